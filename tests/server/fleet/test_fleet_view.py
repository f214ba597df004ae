"""The values of `/dashboard`: rates and percentiles of a window, states of replicas, lists of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fleet_records import instance_record, load

from segue.kv.errors import ErrorCode, PeerLost
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.server.fleet.fleet_view import (
    MAX_LATEST,
    WINDOW_S,
    Distribution,
    Window,
    error_views,
    link_views,
    percentiles,
    replica_views,
    request_views,
    totals,
)
from segue.server.fleet.operator import Row
from segue.server.fleet.replica import Replica
from segue.server.messages.operate import PairStatus, Status
from segue.server.messages.records import Records, RequestRecord
from segue.server.observe.metrics import Metrics

BOUNDS = (0.1, 0.2, 0.4, float("inf"))


def test_percentiles_are_of_the_values_between_two_looks() -> None:
    before = Distribution(BOUNDS, (100.0, 100.0, 100.0, 100.0))
    after = Distribution(BOUNDS, (100.0, 150.0, 200.0, 200.0))
    found = percentiles(before, after)
    assert found is not None
    # 50 values between 100 and 200 ms, 50 between 200 and 400 ms.
    assert (found.p50, found.p90, found.count) == (pytest.approx(200.0), pytest.approx(360.0), 100)
    assert found.p99 == pytest.approx(396.0)
    assert percentiles(after, after) is None


def test_a_value_above_the_last_bound_counts_as_that_bound() -> None:
    found = percentiles(Distribution(BOUNDS, (0, 0, 0, 0)), Distribution(BOUNDS, (0, 0, 0, 3)))
    assert found is not None
    assert (found.p50, found.p99) == (pytest.approx(400.0), pytest.approx(400.0))


def test_rates_are_of_the_window_alone() -> None:
    metrics, window = Metrics(), Window()
    metrics.finished("chat", None)
    window.add(totals(metrics, 0.0))
    for second in range(1, 41):
        metrics.finished("chat", None)
        metrics.finished("chat", ErrorCode.PEER_LOST)
        metrics.timeline({"prefill": 0.2, "wire": 0.1})
        change = window.add(totals(metrics, float(second)))
    first, last = change.first, change.last
    assert change.seconds == WINDOW_S
    assert change.rate(sum(first.outcomes.values()), sum(last.outcomes.values())) == pytest.approx(2.0)
    assert last.outcomes == {"ok": 41, "PEER_LOST": 40}
    assert change.parts_ms == {"prefill": pytest.approx(200.0), "wire": pytest.approx(100.0)}
    assert Window().add(last).parts_ms == {}


def test_times_of_tokens_are_read_from_the_metrics() -> None:
    metrics = Metrics()
    before = totals(metrics, 0.0)
    metrics.ttft.observe(0.15)
    metrics.itl.observe(0.004)
    after = totals(metrics, 1.0)
    ttft, itl = percentiles(before.ttft, after.ttft), percentiles(before.itl, after.itl)
    assert ttft is not None
    assert itl is not None
    assert 100 < ttft.p50 <= 200
    assert 3 < itl.p50 <= 5


def replica(role: Role = Role.PREFILL, **said: Any) -> Replica:
    record = instance_record(new_incarnation(), 9, role=role)
    made = Replica(record, record.replicas[0])
    if said:
        made.load = load(**{"running": 1, "waiting": 2, "pages_free": 5, "pages_total": 8} | said)
        made.session = SimpleNamespace()  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({}, "no session"),
        ({"running": 1}, "serving"),
        ({"draining": True}, "draining"),
        ({"draining": True, "drained": True}, "drained"),
    ],
)
def test_a_replica_has_one_state(said: dict[str, Any], state: str) -> None:
    [view] = replica_views([replica(**said)])
    assert view.state == state


def test_a_replica_shows_its_load_and_its_pages() -> None:
    one = replica(pages_quarantined=1, running=3)
    one.listed = False
    one.running = dict.fromkeys(("a", "b"))  # type: ignore[arg-type]
    decode, prefill = replica_views([one, replica(Role.DECODE)])
    assert (decode.role, prefill.role) == (Role.DECODE, Role.PREFILL)
    assert prefill.state == "left the registry"
    assert (prefill.running, prefill.waiting, prefill.here) == (3, 2, 2)
    assert prefill.pages == {"used": 2, "free": 5, "quarantined": 1}


def test_links_are_named_as_the_replicas_are() -> None:
    prefill, decode = replica(running=0), LeaderId(new_incarnation())
    status = Status(
        role=Role.PREFILL,
        state="serving",
        version="1",
        uptime_s=1.0,
        load=prefill.load,  # type: ignore[arg-type]
        pairs=[
            PairStatus(peer=str(decode), transport="tcp", bytes_per_s=2e9, nbytes=7, succeeded=3, failed=1)
        ],
    )
    row = Row(
        instance=prefill.leader.incarnation,
        dp_rank=0,
        role=Role.PREFILL,
        served_model="tiny",
        address="",
        draining=False,
        sight=status,
    )
    [link] = link_views([row])
    assert (link.prefill, link.decode) == (replica_views([prefill])[0].name, str(decode))
    assert (link.transport, link.succeeded, link.failed) == ("tcp", 3, 1)
    assert (link.bytes_per_s, link.nbytes) == (2e9, 7)


def record(name: str, role: str, **more: Any) -> RequestRecord:
    return RequestRecord(request_id=name, where="here", role=role, began=10.0, seconds=2.0, **more)


def test_requests_that_go_on_come_first_and_errors_say_the_latest_text() -> None:
    records = Records()
    for number in range(5):
        records.put(record(f"sample-{number}", "frontend"))
        lost = PeerLost(f"lost {number}").info if number else None
        records.put(record(f"call-{number}", "http", facts={"status": 503 if number else 200}, error=lost))
    live = [record("now", "frontend", facts={"prompt_tokens": 7, "output_tokens": 2}, ended=False)]
    ended = records.latest("http", 3)
    views = request_views(live, ended, now=15.0)
    assert [view.request_id for view in views] == ["now", "call-4", "call-3", "call-2"]
    assert [view.ago_s for view in views] == [None, 3.0, 3.0, 3.0]
    assert views[0].what == "7 tokens in, 2 out"
    assert len(request_views(live * MAX_LATEST, ended, now=15.0)) == MAX_LATEST
    errors = error_views({"ok": 3, "PEER_LOST": 4, "OUT_OF_CAPACITY": 9}, views)
    assert [(error.code, error.count, error.text) for error in errors] == [
        ("OUT_OF_CAPACITY", 9, ""),
        ("PEER_LOST", 4, "lost 4"),
    ]
    assert errors[0].meaning == "No memory, slot or credit was free in time."
