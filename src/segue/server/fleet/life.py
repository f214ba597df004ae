"""The life of one request, put together from what each process knows of it. Pure.

Each process has a clock of its own. A frontend's records share one; an attempt on an instance begins when the
frontend has sent it there, but for the message's way, which is added to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.kv.printable import printable
from segue.server.messages.records import RequestRecord

#: Name of the record of a whole HTTP request; its samples and attempts have other names.
HTTP = "frontend http"
#: Characters of a line.
_LINE_CHARS = 4096


class DatedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record and its start: `at_s` seconds after the request's arrival; None if unknown."""

    at_s: float | None
    record: RequestRecord


class Life(msgspec.Struct, frozen=True):
    """The records of one request in the order of their beginnings, and who could not be asked."""

    request_id: str
    parts: list[DatedRecord]
    silent: list[str]


def life_of(request_id: str, known: Sequence[Sequence[RequestRecord]], silent: list[str]) -> Life:
    """The life that `known` tells; each of its items is what one process has answered."""
    parts: list[DatedRecord] = []
    attempts: dict[tuple[str, int], float] = {}
    instances: list[RequestRecord] = []
    for records in known:
        arrivals = [r for r in records if r.where == HTTP]
        parts += [DatedRecord(at_s=0.0, record=r) for r in arrivals]
        for record in records:
            if record in arrivals:
                continue
            if not record.where.startswith("frontend"):
                instances.append(record)
                continue
            before = [r.began for r in arrivals if r.began <= record.began]
            at_s = record.began - max(before, default=record.began)
            parts.append(DatedRecord(at_s=at_s, record=record))
            sent = [step.at_s for step in record.steps if step.name == "attempt"]
            attempts |= {(record.request_id, n): at_s + sent_s for n, sent_s in enumerate(sent)}
    for record in instances:
        base, _, number = record.request_id.partition("~")
        parts.append(DatedRecord(at_s=attempts.get((base, int(number or 0))), record=record))
    parts.sort(key=lambda part: (part.at_s is None, part.at_s or 0.0))
    return Life(request_id, parts, silent)


def describe_life(life: Life) -> str:
    """A life as text: a paragraph for each record, a line for each of its steps. Times are milliseconds since
    the request's arrival. Characters that a terminal does not print are escaped."""
    lines = [f"request {life.request_id}"]
    for part in life.parts:
        lines += _lines(part)
    lines += [f"no answer from {who}" for who in life.silent]
    return "\n".join(printable(line, _LINE_CHARS) for line in lines)


def _lines(part: DatedRecord) -> list[str]:
    record, at_s = part.record, part.at_s
    what = f", room {record.room}, attempt {record.attempt}" if record.room else ""
    how = "took" if record.ended else "goes on, so far"
    since = "" if at_s is not None else ", since its own arrival (its frontend is not known)"
    lines = ["", f"{record.where}: {record.request_id}{what}, {how} {record.seconds * 1e3:.1f} ms{since}"]
    for step, end_s in record.timed():
        begins, lasts = ((at_s or 0.0) + step.at_s) * 1e3, (end_s - step.at_s) * 1e3
        lines.append(f"  {begins:10.1f}  {step.name:<12} {lasts:10.1f}  {step.text}".rstrip())
    if record.omitted:
        lines.append(f"  and {record.omitted} more steps")
    facts = ", ".join(f"{name} {count}" for name, count in record.facts.items())
    lines += [f"  {facts}"] if facts else []
    if record.error is not None:
        error = record.error
        by = f" by {error.origin}" if error.origin else ""
        lines.append(f"  ended with {error.code}{by}: {error.text}")
    return lines
