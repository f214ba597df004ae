"""`segue doctor`: look at this host, measure its transports, and say what is wrong and how to mend it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from segue.cli import flags
from segue.cli.doctor import host_checks, instance_checks
from segue.cli.doctor.host_checks import Check
from segue.cli.terminal import print_json, terminal, write_json
from segue.kv import KINDS, USABLE
from segue.kv.session import tls_from_files
from segue.kv.transport.host_speed import Speed, measure
from segue.server.settings.commands import DoctorConfig

#: A transport is reported as slow if it has less than one part in so many of the host's own memory speed.
FAR_UNDER = 20
#: Less than so many times the speed of another transport is noise.
CLEARLY_FASTER = 1.5


class TransportRow(msgspec.Struct, frozen=True, kw_only=True):
    """One transport on this host: why it cannot be used, or what was measured."""

    name: str
    usable: bool
    why_not: str = ""
    speed: Speed | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that `segue doctor` says; `--json` writes it."""

    checks: Sequence[Check]
    transports: Sequence[TransportRow]


def transport_rows(available: Mapping[str, str]) -> tuple[list[TransportRow], list[Check]]:
    """Measure each transport that works here and moves bytes."""
    rows, found = [], []
    for name, reason in available.items():
        if reason != USABLE:
            rows.append(TransportRow(name=name, usable=False, why_not=reason))
            continue
        if not KINDS.kind(name).moves_bytes:
            rows.append(TransportRow(name=name, usable=True))
            continue
        measured = measure(name)
        if isinstance(measured, str):
            rows.append(TransportRow(name=name, usable=False, why_not=measured))
            mend = "see the other lines of this table; or give another --transport"
            found.append(Check(f"transport {name}", "wrong", f"moved nothing here: {measured}", mend))
            continue
        rows.append(TransportRow(name=name, usable=True, speed=measured))
        found.append(speed_check(measured))
    return rows, found + order_check(rows)


def order_check(rows: Sequence[TransportRow]) -> list[Check]:
    """A warning for a transport of `auto` that is slower than one behind it: a pair uses the first one that
    works."""
    speeds = {row.name: row.speed.gb_per_s for row in rows if row.speed is not None}
    order = [name for name in KINDS.automatic() if name in speeds]
    for place, name in enumerate(order):
        faster = max(order[place:], key=lambda other: speeds[other])
        if speeds[faster] > CLEARLY_FASTER * speeds[name]:
            times = speeds[faster] / speeds[name]
            found = f"pairs use {name}, and {faster} is {times:.1f} times as fast here"
            others = [faster, *(other for other in order if other != faster)]
            return [Check("transport order", "warn", found, f"--transport {','.join(others)}")]
    return []


def speed_check(speed: Speed) -> Check:
    """Whether a transport is far under what this host can do."""
    text = f"{speed.gb_per_s:.2f} GB/s, {speed.page_us:.0f} µs a page"
    text += f"; memory does {speed.memory_gb_per_s:.1f} GB/s"
    if speed.gb_per_s * FAR_UNDER >= speed.memory_gb_per_s:
        return Check(f"transport {speed.transport}", "ok", text)
    mend = "look at the settings of its library (ucx, mooncake settings), or give another --transport"
    return Check(f"transport {speed.transport}", "warn", f"{text}: far under what this host can do", mend)


def examine(config: DoctorConfig) -> Report:
    """Everything that can be seen and measured. Raises ConfigError for a setting."""
    encryption = tls_from_files(config.tls, None)
    found = host_checks.checks(config.cache)
    rows, speeds = transport_rows(KINDS.available())
    found += speeds
    if config.registry is not None:
        found += instance_checks.look(config.registry, config.secret or None, encryption)
    return Report(checks=found, transports=rows)


def doctor_command(args: argparse.Namespace) -> int:
    """Examine this host with the settings of `args`."""
    return doctor(flags.with_secret(flags.load(DoctorConfig, "doctor", args)), args.json)


def doctor(config: DoctorConfig, json: str | None) -> int:
    """Print the report, or write it as JSON to the file `json` (`-`: standard output). 1 if something is
    wrong, else 0."""
    report = examine(config)
    if json == "-":
        print_json(report)
    else:
        _print(report)
    if json not in (None, "-"):
        write_json(str(json), report)
    return int(any(check.state == "wrong" for check in report.checks))


def _print(report: Report) -> None:
    colours = {"ok": "green", "warn": "yellow", "wrong": "red"}
    console = terminal()
    table = Table("what", "state", "found", "what to do")
    for check in report.checks:
        table.add_row(check.name, Text(check.state, colours[check.state]), check.found, check.mend)
    console.print(table)
    table = Table("transport", "here", "GB/s", "µs a page", "why not")
    for row in report.transports:
        speed = row.speed
        measured = (f"{speed.gb_per_s:.2f}", f"{speed.page_us:.0f}") if speed is not None else ("", "")
        table.add_row(row.name, "yes" if row.usable else "no", *measured, row.why_not)
    console.print(table)
