"""The checks of `segue doctor` on the instances of a registry: each one, and each pair that must meet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from itertools import product

from segue import __version__
from segue.cli.doctor.host_checks import Check
from segue.kv import KINDS, Limits, Role, SegueError
from segue.kv.model_match import model_difference
from segue.kv.session import Tls
from segue.server.registry.client import open_backend
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord

MAX_PAIRS = 256
_CONNECT_S = 3.0

Address = tuple[str, int]


def name(record: InstanceRecord) -> str:
    """The name of an instance in the table."""
    return f"{record.role.value} {record.incarnation[:8]}"


def look(url: str, secret: bytes | None, tls: Tls | None) -> list[Check]:
    """Ask the registry at `url`, and try whether each instance that it knows can be reached from here."""
    try:
        records, unreachable = asyncio.run(_ask(url, secret, tls))
    except SegueError as error:
        mend = "start it, or correct --registry, --secret-file and the --tls flags"
        return [Check("registry", "wrong", error.info.text, mend)]
    return [
        Check("registry", "ok", f"{url} knows {len(records)} instances"),
        *instance_checks(records, unreachable),
        *pair_checks(records),
    ]


async def _ask(
    url: str, secret: bytes | None, tls: Tls | None
) -> tuple[Sequence[InstanceRecord], Mapping[Address, str]]:
    backend = open_backend(url, secret, Limits(), tls)
    try:
        records = (await backend.instances(None, None, 0.0)).instances
    finally:
        await backend.close()
    addresses = {(r.host, r.port) for record in records for r in record.replicas}
    tried = await asyncio.gather(*(_try(*address) for address in addresses))
    return records, {address: why for address, why in zip(addresses, tried, strict=True) if why}


async def _try(host: str, port: int) -> str:
    """Why nobody answers at an address that the registry names, or ""."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as exc:
        return os.strerror(exc.errno) if exc.errno and exc.errno > 0 else str(exc)
    writer.transport.abort()
    return ""


def instance_checks(records: Sequence[InstanceRecord], unreachable: Mapping[Address, str]) -> list[Check]:
    """Each instance by itself, and whether there is one of each role."""
    found = [_instance(record, unreachable) for record in records]
    roles = {record.role for record in records if record.ready and not record.draining}
    missing = [role.value for role in (Role.PREFILL, Role.DECODE) if role not in roles]
    if missing and Role.UNIFIED not in roles:
        text = f"no {' and no '.join(missing)} instance is ready"
        found.append(Check("fleet", "wrong", text, f"start one: segue {missing[0]} --registry …"))
    return found


def _instance(record: InstanceRecord, unreachable: Mapping[Address, str]) -> Check:
    silent = [
        f"{r.host}:{r.port} cannot be reached from here ({unreachable[r.host, r.port]})"
        for r in record.replicas
        if (r.host, r.port) in unreachable
    ]
    if silent:
        mend = "open that port between the hosts, or correct --advertise-host and --advertise-port"
        return Check(name(record), "wrong", "; ".join(silent), mend)
    said = ", ".join(
        f"rank {r.dp_rank} at {r.host}:{r.port}, segue {r.version or 'unknown'}, "
        f"{' '.join(r.transports) or 'no transport'}"
        for r in record.replicas
    )
    if not record.ready:
        mend = "start the ranks that are missing, with the same --incarnation"
        return Check(name(record), "warn", f"{len(record.replicas)} of {record.dp_size} ranks: {said}", mend)
    if record.draining:
        return Check(name(record), "ok", f"draining; {said}")
    return Check(name(record), "ok", said)


def pair_checks(records: Sequence[InstanceRecord]) -> list[Check]:
    """Each prefill replica with each decode replica of the same served model; at most `MAX_PAIRS`."""
    sides: dict[Role, list[tuple[InstanceRecord, ReplicaRecord]]] = {Role.PREFILL: [], Role.DECODE: []}
    for record in records:
        if record.role in sides:
            sides[record.role] += [(record, replica) for replica in record.replicas]
    pairs = [
        (a, b)
        for a, b in product(sides[Role.PREFILL], sides[Role.DECODE])
        if a[0].served_model == b[0].served_model
    ]
    found = [_pair(*prefill, *decode) for prefill, decode in pairs[:MAX_PAIRS]]
    if len(pairs) > MAX_PAIRS:
        found.append(Check("pairs", "warn", f"{len(pairs) - MAX_PAIRS} more pairs were not compared"))
    return found


def _pair(
    prefill: InstanceRecord, source: ReplicaRecord, decode: InstanceRecord, target: ReplicaRecord
) -> Check:
    what = f"{name(prefill)}/{source.dp_rank} → {name(decode)}/{target.dp_rank}"
    if prefill.model != decode.model:
        return Check(what, "wrong", *model_difference(prefill.model, decode.model))
    if not source.version or not target.version:
        return Check(what, "warn", "one side does not say its version", "run the same segue on both")
    common = [kind for kind in source.transports if kind in target.transports]
    if not common:
        text = f"no transport in common: {' '.join(source.transports)} and {' '.join(target.transports)}"
        return Check(what, "wrong", text, "give both the same --transport, or auto")
    if source.version != target.version:
        text = f"segue {source.version} and {target.version}"
        return Check(
            what, "warn", text, "run the same version on both; they meet if their protocol is the same"
        )
    own = "" if source.version == __version__ else f"; here is {__version__}"
    return Check(what, "ok", f"segue {source.version}{own}; both offer {' '.join(_by_preference(common))}")


def _by_preference(names: Sequence[str]) -> list[str]:
    return sorted((n for n in names if n in KINDS.known), key=lambda n: KINDS.kind(n).preference)
