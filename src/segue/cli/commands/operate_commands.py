"""`segue ps`, `drain`, `resume`, `switch`, `explain`: one question to a running fleet, or one order."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from segue.cli import flags
from segue.cli.commands.operate_flags import seconds
from segue.cli.terminal import print_json
from segue.kv import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ConfigError,
    DeadlineExceeded,
    LeaderId,
    Limits,
    PeerLost,
    Role,
    SegueError,
)
from segue.kv.errors import NotFound
from segue.kv.printable import printable
from segue.kv.session import tls_from_files
from segue.server.fleet.life import Life, describe_life
from segue.server.fleet.operator import DIGITS, Operator, Row, operator, pairs
from segue.server.messages.operate import PairStatus, Status
from segue.server.messages.records import MAX_RECORDS, MAX_RECORDS_BYTES
from segue.server.observe import logs
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.settings.commands import OperatorConfig
from segue.server.settings.registry_address import registry_places
from segue.server.supervisor.local_deployments import local_deployments, local_instances

if TYPE_CHECKING:
    from segue.server.fleet.fleet_view import LinkView

#: The pause before an instance of this host that did not answer is asked again, in seconds.
AGAIN_S = 1.0
#: Characters of a line below the tables.
_LINE_CHARS = 4096


def operate(args: argparse.Namespace) -> int:
    """Run one of the commands; the exit status. Raises SegueErrors."""
    config = flags.load(OperatorConfig, args.command, args)
    if args.command == "drain" and args.self_:
        return asyncio.run(_drain_self(config, seconds(args.timeout)))
    fleets = reached(config)
    if args.command == "ps":
        return asyncio.run(_ps(fleets, as_json=args.json))
    if args.command == "explain":
        return asyncio.run(_explain(fleets, args.request_id, as_json=args.json))
    role = Role(args.role) if args.command == "switch" else None
    draining = args.command != "resume"
    return asyncio.run(_steer(fleets, args.instance, draining, role, seconds(args.timeout)))


def reached(config: OperatorConfig) -> dict[str, OperatorConfig]:
    """The fleets that a command asks: the one of `--registry`, by that address, else those of this user on
    this host, by the URL of each frontend, the latest first. Raises ConfigError without any."""
    if config.registry is not None:
        return {config.registry: config}
    found = {
        here.url: replace(config, registry=here.registry, secret_file=here.secret_file, tls=here.tls)
        for here in local_deployments()
    }
    if not found:
        raise ConfigError(
            "no deployment of this user runs on this host: start one with segue serve, or give --registry"
        )
    return found


def own_instance(config: OperatorConfig) -> OperatorConfig:
    """The fleet of the one instance that runs here: in this pod, or as the service that systemd stops. Raises
    ConfigError without any, or with several."""
    found = local_instances()
    if (service := os.environ.get("MAINPID")) is not None:  # systemd sets it for ExecStop=
        found = [here for here in found if str(here.pid) == service]
    if len(found) != 1:
        there = ", ".join(here.registry.partition("://")[2] for here in found) or "none"
        raise ConfigError(
            f"--self needs one instance of this user on this host, started by segue prefill, decode or "
            f"unified, and here are: {there}"
        )
    [here] = found
    return replace(config, registry=here.registry, secret_file=here.secret_file, tls=here.tls)


async def _drain_self(config: OperatorConfig, timeout_s: float) -> int:
    """Drain the instance of this host. If it does not answer it is busy, since its process runs: ask again
    until `timeout_s` is over."""
    ends_at = time.monotonic() + timeout_s
    while True:
        try:
            await _drained_once(own_instance(config), timeout_s)
            return 0
        except (BootstrapTimeout, BootstrapUnreachable, DeadlineExceeded, PeerLost) as error:
            timeout_s = round(ends_at - time.monotonic() - AGAIN_S, 1)
            if timeout_s <= 0:
                raise
            logs.say(f"{error}; it is asked again")
            await asyncio.sleep(AGAIN_S)


async def _drained_once(config: OperatorConfig, timeout_s: float) -> None:
    assert config.registry is not None
    ends_at = time.monotonic() + timeout_s
    where, ranks = f"the instance at {config.registry}", len(registry_places(config.registry))
    async with _operator(config) as operator:
        try:
            async with asyncio.timeout(timeout_s):
                records = await operator.instances()
        except TimeoutError:
            raise DeadlineExceeded(f"{where} did not answer within {timeout_s:g} s") from None
        answering = sum(len(record.replicas) for record in records)
        if answering < ranks:
            raise PeerLost(f"{answering} of {ranks} ranks of {where} answer")
        for record in records:
            # A preStop hook that takes longer than it was given has none of the pod's grace period left.
            left_s = round(max(0.1, ends_at - time.monotonic()), 1)
            await operator.steer(record, draining=True, timeout_s=left_s, say=_printed(record))


def _printed(record: InstanceRecord) -> Callable[[ReplicaRecord, Status], None]:
    """Prints each answer of a leader of `record`."""

    def say(where: ReplicaRecord, sight: Status) -> None:
        who = f"{record.role} {LeaderId(record.incarnation, where.dp_rank)}"
        print(f"{who} {sight.state}: {_holding(sight)}", flush=True)

    return say


async def _ps(fleets: Mapping[str, OperatorConfig], *, as_json: bool) -> int:
    rows, status = {}, 0
    for url, config in fleets.items():
        try:
            async with _operator(config) as operator:
                rows[url] = await operator.ps()
        except SegueError as error:
            if len(fleets) == 1:
                raise
            logs.say(f"{url}: {error}")
            status = 1
    if as_json:
        print_json([row for each in rows.values() for row in each])
    elif len(fleets) == 1:
        print(*map(shown, rows.values()), sep="\n")
    else:
        print(*(f"{url}\n{shown(each)}" for url, each in rows.items()), sep="\n\n")
    return status


async def _explain(fleets: Mapping[str, OperatorConfig], request_id: str, *, as_json: bool) -> int:
    life = Life(request_id, [], [])
    for url, config in fleets.items():
        try:
            async with _operator(config) as operator:
                found = await operator.explain(request_id)
        except SegueError as error:
            if len(fleets) == 1:
                raise
            life.silent.append(f"{url}: {error}")
            continue
        life = Life(request_id, found.parts, life.silent + found.silent)
        if life.parts:
            break
    if as_json:
        print_json(life)
    elif life.parts:
        print(describe_life(life))
    if not life.parts:
        unasked = f"; without an answer: {'; '.join(life.silent)}" if life.silent else ""
        raise NotFound(
            f"no process knows the request {request_id[:128]!r}: each keeps its latest {MAX_RECORDS} "
            f"records, in at most {MAX_RECORDS_BYTES >> 20} MiB, until it ends{unasked}"
        )
    return 0


async def _with_instance(fleets: Mapping[str, OperatorConfig], name: str) -> OperatorConfig:
    """The fleet with the instance `name`. Raises NotFound, also where several have one."""
    if len(fleets) == 1:
        return next(iter(fleets.values()))
    found, errors = {}, []
    for url, config in fleets.items():
        try:
            async with _operator(config) as operator:
                await operator.named(name)
        except SegueError as error:
            errors.append(f"{url}: {error}")
        else:
            found[url] = config
    if len(found) > 1:
        raise NotFound(f"{' and '.join(found)} have an instance {name[:64]!r}; give more digits of its name")
    if not found:
        raise NotFound("; ".join(errors))
    return next(iter(found.values()))


def _operator(config: OperatorConfig) -> AbstractAsyncContextManager[Operator]:
    assert config.registry is not None  # `reached` has found one
    tls = tls_from_files(config.tls, None)
    secret = flags.with_secret(config).secret or None
    return operator(config.registry, secret=secret, limits=Limits(), tls=tls)


async def _steer(
    fleets: Mapping[str, OperatorConfig], name: str, draining: bool, role: Role | None, timeout_s: float
) -> int:
    async with _operator(await _with_instance(fleets, name)) as operator:
        record = await operator.named(name)
        say = _printed(record)
        if role is None:
            await operator.steer(record, draining=draining, timeout_s=timeout_s, say=say)
        else:
            found = await operator.switch(record, role, timeout_s=timeout_s, say=say)
            print(f"{found.role} {found.incarnation[:DIGITS]} serving, before it {record.role}", flush=True)
    return 0


def _holding(sight: Status) -> str:
    load = sight.load
    return f"running {load.running}, waiting {load.waiting}, quarantined pages {load.pages_quarantined}"


def shown(rows: Sequence[Row]) -> str:
    """The answer of `segue ps` as text: a line for each leader, then one for each pair."""
    if not rows:
        return "no instance is registered"
    lines = [_line(row) for row in sorted(rows, key=lambda row: (row.role, row.instance, row.dp_rank))]
    text = table(("INSTANCE", "DP", "ROLE", "STATE", "MODEL", "ADDRESS", "RUNNING", "WAITING",
                  "PAGES USED/FREE/QUARANTINED", "SLOTS", "FRONTENDS", "VERSION", "UP"), lines)  # fmt: skip
    troubles = [f"{row.instance[:DIGITS]} dp{row.dp_rank}: {row.trouble}" for row in rows if row.trouble]
    joined = pairs(rows)
    if joined:
        text += "\n\n" + table(
            ("PREFILL", "DECODE", "TRANSPORT", "GB/S", "GB", "HAND-OFFS", "FAILED"),
            [(*names, *pair_cells(pair)) for names, pair in sorted(joined.items(), key=lambda item: item[0])],
        )
    if troubles:
        text += "\n\n" + "\n".join(printable(line, _LINE_CHARS) for line in troubles)
    return text


def pair_cells(pair: PairStatus | LinkView) -> tuple[str, ...]:
    """The cells of a pair's row: transport, GB/s, GB, succeeded and failed hand-offs."""
    speed, size = "-", "-"  # nothing was carried yet, or only decode answered, which has measured nothing
    if pair.nbytes:
        speed, size = f"{pair.bytes_per_s / 1e9:.2f}", f"{pair.nbytes / 1e9:.3f}"
    return pair.transport, speed, size, str(pair.succeeded), str(pair.failed)


def _line(row: Row) -> tuple[str, ...]:
    sight = row.sight
    head = (row.instance[:DIGITS], str(row.dp_rank), row.role.value)
    where = (row.served_model, row.address)
    if sight is None:
        return (*head, "no answer", *where, "-", "-", "-", "-", "-", "-", "-")
    load = sight.load
    pools = ("/".join(map(str, pool.values())) or "-" for pool in (load.pages, load.slots))
    counts = (str(load.running), str(load.waiting), *pools, str(len(sight.frontends)))
    return (*head, sight.state, *where, *counts, sight.version, duration(sight.uptime_s))


def duration(seconds: float) -> str:
    """A time in its two largest units: `3h12m`."""
    whole = int(seconds)
    for unit, name, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // smaller}{below}"
    return f"{whole}s"


def table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their longest entry; characters that a terminal does not print are escaped."""
    lines = [tuple(map(printable, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    )
