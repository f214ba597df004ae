"""`segue top`: what `/dashboard` shows, in a terminal, out of the same events."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Iterator

import httpx2 as httpx
import msgspec
from rich.table import Table
from rich.text import Text

from segue.cli.commands.client_flags import authorization, server_of, trusting
from segue.cli.commands.operate_commands import duration, pair_cells
from segue.cli.terminal import Group, RenderableType, live, terminal
from segue.kv import DECODE_ERRORS, ConfigError, PeerLost, SegueError
from segue.server.fleet.fleet_view import LOOK_S, PATH, FleetView, Percentiles, ReplicaView

#: A frontend that lives sends a look each `LOOK_S`.
SILENT_S = 30 * LOOK_S
MAX_EVENT_BYTES = 4 << 20
_STYLES = {"serving": "green", "no session": "red"}
#: A line of an instance fits a terminal of 80 columns.
_BAR = 8


def top(args: argparse.Namespace) -> int:
    """Show the fleet until an interrupt; the exit status. Raises SegueErrors."""
    server = server_of(args)
    console = terminal()
    trust = trusting(server.https_cert) if server.https_cert else None
    views = looks(server.url, authorization(server.api_key_file), trust)
    if args.once:
        console.print(shown(next(views)))
        return 0
    with live(console) as display:
        try:
            for view in views:
                display.update(shown(view), refresh=True)
        except KeyboardInterrupt:
            return 0
    print("segue: the frontend has left")
    return 0


def looks(url: str, headers: dict[str, str], trust: ssl.SSLContext | None = None) -> Iterator[FleetView]:
    """The looks of a frontend until it leaves. Raises PeerLost, and the error of its answer."""
    where = f"{url.rstrip('/')}{PATH}/events"
    timeout = httpx.Timeout(SILENT_S, connect=10.0)
    try:
        with httpx.stream("GET", where, headers=headers, timeout=timeout, verify=trust or True) as answer:
            if answer.status_code != 200:
                raise SegueError(f"{where} answers {answer.status_code}: {_reason(answer)}")
            for line in _lines(answer):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield msgspec.json.decode(line[6:], type=FleetView)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"{url!r} is no URL of a frontend: {error}") from error
    except httpx.HTTPError as error:
        raise PeerLost(f"{where} cannot be read: {error or type(error).__name__}") from error
    except DECODE_ERRORS as error:
        raise SegueError(f"{where} is no dashboard of this version of segue: {error}") from error


def _reason(answer: httpx.Response) -> str:
    body = b""
    for piece in answer.iter_bytes():
        body += piece
        if len(body) > 4096:
            break
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*DECODE_ERRORS, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    kept = b""
    for piece in answer.iter_bytes():
        *whole, kept = (kept + piece).split(b"\n")
        if len(kept) > MAX_EVENT_BYTES:
            raise SegueError(f"{answer.url} sends an event of more than {MAX_EVENT_BYTES} bytes")
        yield from whole


def shown(view: FleetView) -> RenderableType:
    """One look as tables."""
    state = Text("ready", "green") if view.ready else Text(f"not ready: {view.reason}", "red")
    head = Text.assemble(
        (f"segue {view.model}  ", "bold"),
        state,
        f"  {view.frontend}, {view.version}, up {duration(view.uptime_s)}",
    )
    waiting = sum(replica.waiting for replica in view.replicas)
    now = Text(
        f"{view.answering} generations, {waiting} waiting; in the last {view.window_s:.0f} s "
        f"{view.requests_per_s:.1f} requests/s, {view.tokens_per_s:.1f} tokens/s"
    )
    times = Text(
        f"first token p50/p90/p99 {_times(view.ttft_ms)}, between tokens {_times(view.itl_ms)}\n"
        "first token's parts (means): "
        + (", ".join(f"{name} {ms:.1f} ms" for name, ms in view.ttft_parts_ms.items()) or "none")
    )
    parts: list[RenderableType] = [head, now, times, _replicas(view.replicas)]
    if view.links:
        parts.append(_links(view))
    if view.trouble:
        parts.append(Text(view.trouble, "yellow"))
    parts.append(_requests(view))
    if view.errors:
        parts.append(_errors(view))
    return Group(*parts)


def _times(found: Percentiles | None) -> str:
    return "-" if found is None else f"{found.p50:.1f}/{found.p90:.1f}/{found.p99:.1f} ms"


def _table(*columns: str, numbers: int) -> Table:
    """A table whose last `numbers` columns are figures."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for at, name in enumerate(columns):
        made.add_column(name, justify="right" if at >= len(columns) - numbers else "left")
    return made


def _replicas(replicas: list[ReplicaView]) -> Table:
    table = _table(
        "INSTANCE", "ROLE", "STATE", "PAGES", "USED", "QUARANTINED", "RUNNING", "WAITING", numbers=4
    )
    for each in replicas:
        total, pages = sum(each.pages.values()), each.pages
        used, quarantined = pages.get("used", 0), pages.get("quarantined", 0)
        table.add_row(
            each.name,
            each.role.value,
            Text(each.state, _STYLES.get(each.state, "yellow")),
            _bar(used, quarantined, total),
            *(str(count) for count in (used, quarantined, each.running, each.waiting)),
        )
    return table


def _bar(used: int, quarantined: int, total: int) -> Text:
    if not total:
        return Text("")
    first, second = -(-used * _BAR // total), -(-quarantined * _BAR // total)
    return Text.assemble(
        ("█" * first, "blue"), ("▓" * second, "red"), ("░" * max(0, _BAR - first - second), "dim")
    )


def _links(view: FleetView) -> Table:
    table = _table("PREFILL", "DECODE", "TRANSPORT", "GB/S", "GB", "HAND-OFFS", "FAILED", numbers=4)
    for link in view.links:
        table.add_row(link.prefill, link.decode, *pair_cells(link))
    return table


def _requests(view: FleetView) -> Table:
    table = _table("REQUEST", "ENDED", "RESULT", "SECONDS", numbers=1)
    for each in view.requests:
        ended = "goes on" if each.ago_s is None else f"{duration(each.ago_s)} ago"
        result = Text(f"{each.what}, {each.code}: {each.text}", "red") if each.code else Text(each.what)
        result.truncate(80, overflow="ellipsis")
        table.add_row(Text(each.request_id), ended, result, f"{each.seconds:.2f}")
    return table


def _errors(view: FleetView) -> Table:
    table = _table("ERROR", "THE LATEST", "REQUESTS", numbers=1)
    for each in view.errors:
        text = Text(each.text or each.meaning)
        text.truncate(100, overflow="ellipsis")
        table.add_row(Text(each.code, "red"), text, str(each.count))
    return table
