"""Whoever else asks the registry: rooms, second writers, wrong secrets, and bytes of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from msgspec.structs import replace

from segue.kv.errors import ErrorCode, SegueError
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.limits import Limits
from segue.lab.sim.outsider import Outsider, RawConnection
from segue.lab.sim.sim_http import SimHttp
from segue.lab.sim.sim_leader import LeaderNode
from segue.lab.sim.sim_registry import CONNECT_S, HOST, PORT, TTL_S, URL, RegistryNode
from segue.lab.sim.world import new_leader
from segue.server.http.guarded_http import MAX_HEAD_BYTES, ErrorBody
from segue.server.registry.auth import bearer_token
from segue.server.registry.client import LocalRegistry, RegistryClient
from segue.server.registry.message_digest import DIGEST_HEADER
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.registry.registry_server import MAX_BODY_BYTES

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment

SECRET = b"some other secret of somebody"


class Guest(Outsider):
    """One guest; `node` is the instance that it speaks of."""

    WHAT, DONE = "guest", "guests"

    def __init__(self, deployment: Deployment, node: LeaderNode, name: str, kind: str) -> None:
        # Without a secret only the registry's own machine is answered.
        super().__init__(deployment, name, kind, "10.9.9.9" if kind == "elsewhere" else "127.0.6.1")
        self.node = node
        self._registry = registry = deployment.registry.node
        #: a registry that has started anew has not heard of everybody
        self._heard = registry is not None and self._is_listed(registry)

    def _is_listed(self, registry: RegistryNode) -> bool:
        entry = registry.store._entries.get(self.node.me.incarnation)
        return entry is not None and len(entry.ranks) == self.node.spec.dp_size

    async def visits(self) -> None:
        """What it comes for."""
        await GUESTS[self.kind](self)

    # ---- what it is told ----------------------------------------------------------------------------

    @property
    def undisturbed(self) -> bool:
        """Nothing has come between us and the registry, and the instance is what it was."""
        registry, node, trouble_at = self._registry, self.node, self.deployment.registry.trouble_at
        same = registry is not None and registry is self.deployment.registry.node and not registry.closing
        members, leaders = self.deployment.registry.members, self.deployment.leaders_of(node)
        there = self._heard and all(
            members[leader].joined_at is not None and not members[leader].left for leader in leaders
        )
        return (
            same
            and trouble_at < self.began_at
            and there
            and not any(n.was_paused or n.draining or not n.alive for n in (node, *leaders))
        )

    def client(self, secret: bytes | None = None) -> RegistryClient:
        """Production's client in this process; the deployment's secret unless another is given."""
        return RegistryClient(
            URL,
            secret=secret or self.deployment.secret,
            limits=Limits(connect_s=CONNECT_S, registry_ttl_s=TTL_S),
            transport=SimHttp(self.loop),
            clock=self.clock,
        )

    async def told(self, work: Awaitable[object], *codes: ErrorCode) -> object:
        """What `work` gives; it must fail with one of `codes`, or must not if there are none."""
        try:
            found = await work
        except SegueError as error:
            if error.info.code not in codes:
                self.wrong(f"was told {error}")
            return None
        if codes:
            self.wrong(f"was given {found}")
        return found

    def record(self, **changes: Any) -> InstanceRecord:
        """What the instance has said of itself, or something else."""
        record = replace(self.node.record(), **changes)
        self.deployment.registry.said_by_guests.append(record)
        return record

    async def raw(self) -> RawConnection | None:
        """A connection of bytes."""
        return await self.types(RawConnection, HOST, PORT)


# ---- second writers -----------------------------------------------------------------------------------


async def _second_writer(guest: Guest) -> None:
    """Somebody speaks in the name of a living incarnation, and says something else of it."""
    record, me = guest.record(), guest.node.me
    moved = [ReplicaRecord(dp_rank=me.dp_rank, host=guest.node.host, port=guest.node.port + 20)]
    twins = [ReplicaRecord(dp_rank=rank, host=guest.node.host, port=1) for rank in (0, 1)]
    code = ErrorCode
    for changes, expected in (
        ({"replicas": moved}, code.DP_RANK_CONFLICT),
        ({"model": record.model + "?"}, code.DP_RANK_CONFLICT),
        ({"role": Role.UNIFIED if record.role is not Role.UNIFIED else Role.DECODE}, code.DP_RANK_CONFLICT),
        ({"dp_size": record.dp_size + 1}, code.DP_RANK_CONFLICT),
        ({"replicas": [replace(moved[0], dp_rank=5)]}, code.DP_RANK_OUT_OF_RANGE),
        ({"replicas": [replace(moved[0], port=0)]}, code.INVALID_REQUEST),
        ({"model": "m" * 600}, code.INVALID_REQUEST),
        ({"tp_size": 0}, code.INVALID_REQUEST),
        ({"http_port": -1}, code.INVALID_REQUEST),
        ({"incarnation": Incarnation("i" * 65)}, code.INVALID_REQUEST),
    ):
        await guest.told(guest.client().register(guest.record(**changes)), expected)
    again = guest.client()._backend.put_rank(guest.record(replicas=twins), me.dp_rank)
    await guest.told(again, code.INVALID_REQUEST)
    await guest.told(guest.client()._backend.put_rank(record, me.dp_rank))


async def _past(guest: Guest) -> None:
    """An incarnation that has left does not come back."""
    client = guest.client()
    mine = replace(
        guest.node.record(),
        incarnation=new_leader(guest.rng).incarnation,
        replicas=[ReplicaRecord(dp_rank=0, host="127.0.6.1", port=1)],
        # It is never ready, so nobody is told of it.
        dp_size=2,
    )
    await guest.told(client.register(mine))
    keeping = asyncio.ensure_future(client.keep_alive(mine.incarnation))
    await guest.told(client.set_draining(mine.incarnation, True))
    both = [replace(mine.replicas[0], dp_rank=1)]
    await guest.told(client.register(replace(mine, replicas=both)), ErrorCode.DP_RANK_CONFLICT)
    await client.leave(LeaderId(mine.incarnation))
    await guest.told(keeping)
    await guest.told(client.register(mine), ErrorCode.DRAINING)
    await guest.told(client.set_draining(mine.incarnation, True), ErrorCode.NOT_FOUND)
    await guest.told(client.keep_alive(mine.incarnation), ErrorCode.NOT_FOUND)
    await client.leave(LeaderId(mine.incarnation))
    await client.aclose()


async def _wrong_secret(guest: Guest) -> None:
    """Another secret, or none, at a registry that has one."""
    if guest.deployment.secret is None:
        return
    client = guest.client(SECRET)
    await guest.told(client.register(guest.record()), ErrorCode.UNAUTHORIZED)
    await guest.told(anext(client.watch()), ErrorCode.UNAUTHORIZED)
    await guest.told(client.resolve_room(7, 1.0), ErrorCode.UNAUTHORIZED)
    await client.leave(guest.node.me)
    if client.last_error is None or client.last_error.info.code is not ErrorCode.UNAUTHORIZED:
        guest.wrong("could say that somebody else has left")


async def _elsewhere(guest: Guest) -> None:
    """Another machine, at a registry without a secret."""
    if guest.deployment.secret is None and not guest.deployment.network.translator:
        await guest.told(guest.client().register(guest.record()), ErrorCode.UNAUTHORIZED)


# ---- rooms --------------------------------------------------------------------------------------------


async def _rooms(guest: Guest) -> None:
    """Who asks for a room before, while and after it has an owner."""
    one, two, me = guest.client(), guest.client(), guest.node.me
    room, ttl_s = guest.rng.getrandbits(63) or 1, guest.rng.choice((1.0, 2.0))
    waiting = asyncio.ensure_future(one.resolve_room(room, 4.0))
    await asyncio.sleep(guest.rng.random())
    began = guest.world.now
    await guest.told(two.register_room(room, me, ttl_s))
    found = await guest.told(waiting)
    if found != me:
        guest.wrong(f"room {room} belongs to {found}, not to {me}")
    await guest.told(two.register_room(room, me, ttl_s))
    other = LeaderId(guest.node.me.incarnation, 3)
    await guest.told(two.register_room(room, other, ttl_s), ErrorCode.DP_RANK_OUT_OF_RANGE)
    registry = guest.deployment.registry.node
    heard = registry.store._entries if registry is not None else {}
    for instance, member in guest.deployment.registry.members.items():
        if not isinstance(instance, LeaderNode) or instance is guest.node:
            continue
        if instance.me.incarnation in heard and not member.left and instance.alive:
            await guest.told(
                two.register_room(room, instance.me, ttl_s),
                ErrorCode.DP_RANK_CONFLICT,
                *((ErrorCode.NOT_FOUND,) if instance.was_paused or instance.died_at else ()),
            )
            break
    nobody = LeaderId(Incarnation("nobody"), 0)
    await guest.told(two.register_room(room + 2, nobody, ttl_s), ErrorCode.NOT_FOUND)
    await guest.told(two.register_room(room + 2, me, -1.0), ErrorCode.INVALID_REQUEST)
    await guest.told(two.register_room(0, me, 1.0), ErrorCode.INVALID_REQUEST)
    await guest.told(one.resolve_room(room + 4, 0.5), ErrorCode.BOOTSTRAP_TIMEOUT)
    registry = guest.deployment.registry.node
    if registry is None:
        return
    for late_s, there in ((-0.2, True), (0.2, False)):
        await asyncio.sleep(max(0.0, began + ttl_s + late_s - guest.world.now))
        look = await guest.told(one._backend.room(room, 0.0))
        if (look is not None) is not there:
            guest.wrong(f"room {room} after {guest.world.now - began:.3f} of {ttl_s} s: {look}")
    await guest.told(two.register_room(room, me, ttl_s))
    stuck = asyncio.ensure_future(one.resolve_room(room + 6, 30.0))
    await asyncio.sleep(0.1)
    await one.aclose()
    await guest.told(stuck, ErrorCode.DRAINING)


async def _leaves_a_question(guest: Guest) -> None:
    """A query that waits ends with its client."""
    client, room = guest.client(), guest.rng.getrandbits(63) or 1
    waiting = asyncio.ensure_future(client.resolve_room(room, 60.0))
    await asyncio.sleep(0.2)
    registry = guest.deployment.registry.node
    if registry is not None and room not in registry.store._watchers:
        guest.wrong("its query does not wait")
    waiting.cancel()
    await asyncio.sleep(0.2)
    if registry is not None and registry.alive and room in registry.store._watchers:
        guest.wrong("its query still waits, for nobody")


# ---- bytes --------------------------------------------------------------------------------------------


async def _queries(guest: Guest) -> None:
    """Queries that no client of ours would ask, and the status of each answer."""
    secret = guest.deployment.secret
    headers = {} if secret is None else {"Authorization": f"Bearer {bearer_token(secret)}"}
    me = guest.node.me
    rank, body = f"/v1/instances/{me.incarnation}/ranks/{me.dp_rank}", msgspec.json.encode(guest.record())
    async with httpx.AsyncClient(base_url=URL, transport=SimHttp(guest.loop), headers=headers) as client:
        for method, path, content, more, status in (
            ("GET", "/v1/health", b"", {"Authorization": ""}, 200),
            ("GET", "/v1/instances", b"", {}, 200),
            ("GET", "/v1/instances?role=decode", b"", {}, 200),
            ("GET", "/v1/instances?role=king", b"", {}, 400),
            ("GET", "/v1/instances?version=soon", b"", {}, 400),
            ("GET", "/v1/instances?wait_s=-1", b"", {}, 400),
            ("GET", "/v1/instances?wait_s=inf", b"", {}, 400),
            ("GET", "/v1/nothing", b"", {}, 404),
            ("POST", rank, body, {}, 404),
            ("PUT", rank, body, {}, 200),
            ("PUT", rank, body, {DIGEST_HEADER: "0" * 16}, None),
            ("GET", "/v1/instances", b"", {DIGEST_HEADER: "0" * 16}, None),
            ("PUT", f"/v1/instances/another/ranks/{me.dp_rank}", body, {}, 400),
            ("PUT", f"/v1/instances/{me.incarnation}/ranks/first", body, {}, 400),
            ("PUT", rank, b"{", {}, 400),
            ("PUT", rank, b" " * (MAX_BODY_BYTES + 1), {}, None),
            ("PUT", "/v1/rooms/x", b'{"incarnation":"a","dp_rank":0,"ttl_s":1}', {}, 400),
            ("GET", "/v1/rooms/x", b"", {}, 400),
            ("GET", "/v1/rooms/5?wait_s=0.1", b"", {}, None),
        ):
            try:
                answer = await client.request(method, path, content=content, headers=more)
            except httpx.HTTPError as error:
                guest.wrong(f"{method} {path}: {error!r}")
                return
            code = answer.status_code
            if code == 200 if status is None else code != status:
                guest.wrong(f"{method} {path} was answered {code}: {answer.text[:200]}")
            if code != 200 and guest.undisturbed:
                msgspec.json.decode(answer.content, type=ErrorBody)


def _typed(kind: str, data: Callable[[Guest], bytes], within_s: float, said: bytes = b"") -> None:
    async def types(guest: Guest) -> None:
        typed = await guest.raw()
        if typed is not None:
            typed.transport.write(data(guest))
            await guest.is_cut(typed, within_s)
            if said not in typed.heard:
                guest.wrong(f"was answered {bytes(typed.heard)!r}")

    GUESTS[kind] = types


async def _drips(guest: Guest) -> None:
    """A query that comes byte by byte, for ever."""
    typed = await guest.raw()
    if typed is not None:
        dripping = asyncio.ensure_future(_drip(typed))
        await guest.is_cut(typed, Limits().handshake_s)
        dripping.cancel()


async def _drip(typed: RawConnection) -> None:
    typed.transport.write(b"GET /v1/health HTTP/1.1\r\nx: ")
    while True:
        await asyncio.sleep(0.2)
        typed.transport.write(b"x")


async def _flood(guest: Guest) -> None:
    """More pending connections than fit: a client of ours is let in all the same."""
    crowd = await guest.floods(guest.raw)
    registry = guest.deployment.registry.node
    if registry is not None and registry.server.server.pending > 128:
        guest.wrong(f"{registry.server.server.pending} pending connections are kept")
    await guest.told(guest.client()._backend.put_rank(guest.record(), guest.node.me.dp_rank))
    for typed in crowd:
        await guest.is_cut(typed, Limits().handshake_s)


async def _in_process(guest: Guest) -> None:
    """`LocalRegistry` is the same without a network."""
    registry = guest.deployment.registry.node
    if registry is None or registry.paused:
        return
    local = LocalRegistry(registry.store, limits=Limits(), clock=registry.clock)
    records = [record async for record in _first(local)]
    if guest.undisturbed and guest.node.me.incarnation not in {record.incarnation for record in records}:
        guest.wrong("is not listed")
    await local.aclose()


async def _first(local: LocalRegistry) -> Any:
    async for records in local.watch():
        for record in records:
            yield record
        return


def _noise(guest: Guest) -> bytes:
    return b"\x00" + guest.rng.randbytes(200)


GUESTS: dict[str, Callable[[Guest], Coroutine[Any, Any, None]]] = {
    "second writer": _second_writer,
    "past": _past,
    "wrong secret": _wrong_secret,
    "elsewhere": _elsewhere,
    "rooms": _rooms,
    "leaves a question": _leaves_a_question,
    "queries": _queries,
    "drips": _drips,
    "registry flood": _flood,
    "in process": _in_process,
}
_typed("half a query", lambda guest: b"PUT /v1/inst", Limits().handshake_s, b"408")
_typed("tls at the registry", lambda guest: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 1.0)
_typed("noise at the registry", _noise, 1.0)
_typed("long head", lambda guest: b"GET / HTTP/1.1\r\nx: " + b"x" * (MAX_HEAD_BYTES + 70000), 1.0)
GUEST_KINDS = tuple(GUESTS)
