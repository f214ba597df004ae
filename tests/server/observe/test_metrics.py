import msgspec
import pytest
from prometheus_client import CollectorRegistry, Histogram

from segue.engine.request import Usage
from segue.kv.errors import ErrorCode
from segue.server.messages.control import Load
from segue.server.observe.metrics import PHASES, Metrics, QuickHistogram


def samples(metrics: Metrics) -> dict[str, float]:
    """Every series by its name and labels."""
    out = {}
    for family in metrics.registry.collect():
        for s in family.samples:
            if not s.name.endswith("_created"):
                out[s.name + "".join(f"/{v}" for v in s.labels.values())] = s.value
    return out


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_a_quick_histogram_is_what_prometheus_makes_of_the_same_values(labels: tuple[str, ...]) -> None:
    bounds, registry = (1, 8, 16.5), CollectorRegistry()
    ours = QuickHistogram("ours", "text", bounds, registry, labels)
    theirs = Histogram("theirs", "text", labels, buckets=bounds, registry=registry)
    for value in (0, 1, 1.5, 8, 8, 16.5, 17, 1e9):  # also those that are a bound
        (ours.labels("x", "y") if labels else ours).observe(value)
        (theirs.labels("x", "y") if labels else theirs).observe(value)
    shown = [
        [(s.name.partition("_")[2], s.labels, s.value) for s in family.samples if "created" not in s.name]
        for family in registry.collect()
    ]
    assert shown[0] == shown[1]
    assert len(shown[0]) == 4 + 2


def test_two_metrics_share_nothing() -> None:
    one, two = Metrics(), Metrics()
    one.output_tokens.inc(5)
    assert samples(one)["segue_output_tokens_total"] == 5
    assert samples(two)["segue_output_tokens_total"] == 0


def test_outcomes_and_refusals_are_counted() -> None:
    metrics = Metrics()
    metrics.finished("chat", None)
    metrics.finished("chat", ErrorCode.OUT_OF_CAPACITY)
    seen = samples(metrics)
    assert seen["segue_requests_total/chat/ok"] == 1
    assert seen["segue_requests_total/chat/OUT_OF_CAPACITY"] == 1
    assert seen["segue_rejected_total"] == 1


def test_all_phases_are_recorded_and_unknown_ones_are_not() -> None:
    metrics = Metrics()
    metrics.timeline({**dict.fromkeys(PHASES, 0.25), "made-up": 1.0})
    seen = samples(metrics)
    assert [seen[f"segue_handoff_seconds_sum/{p}"] for p in PHASES] == [0.25] * 6
    assert not [s for s in seen if "made-up" in s]


def test_pages_and_slots_add_up_and_end_with_the_replica() -> None:
    metrics = Metrics()
    load = Load(dp_rank=0, running=2, waiting=3, tokens=9, pages_free=5, pages_total=16, pages_quarantined=4)
    metrics.load("decode", "ab12/0", load)
    seen = samples(metrics)
    states = {s: seen[f"segue_pages/decode/ab12/0/{s}"] for s in ("free", "used", "quarantined")}
    assert states == {"free": 5, "used": 7, "quarantined": 4}
    assert seen["segue_replica_running/decode/ab12/0"] == 2
    assert seen["segue_replica_waiting/decode/ab12/0"] == 3
    assert not [name for name in seen if name.startswith("segue_slots")], "its model keeps KV alone"
    full = msgspec.structs.replace(load, slots_free=0, slots_total=3, slots_quarantined=1)
    metrics.load("decode", "ab12/0", full)
    seen = samples(metrics)
    assert {s: seen[f"segue_slots/decode/ab12/0/{s}"] for s in states} == {
        "free": 0,
        "used": 2,
        "quarantined": 1,
    }
    metrics.forget("decode", "ab12/0")
    metrics.forget("decode", "never/0")
    assert not [s for s in samples(metrics) if "ab12" in s]
    assert b"segue_e2e_seconds_count 0.0" in metrics.exposition()


def test_what_a_prompt_cost_that_was_placed_again_is_counted_by_whether_it_was_kept() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.placed_again(Usage(prompt_tokens=60, decode_cached=10, prefill_cached=20, computed=30))
    seen = samples(metrics)
    assert seen["segue_placed_again_prompt_tokens_total/kept"] == 60
    assert seen["segue_placed_again_prompt_tokens_total/computed"] == 60
    metrics.placed_again(Usage(prompt_tokens=3, decode_cached=2, computed=1))
    assert samples(metrics)["segue_placed_again_prompt_tokens_total/kept"] == 62


def test_only_a_full_place_counts_as_a_rejection() -> None:
    metrics = Metrics()
    for code in ErrorCode:
        metrics.finished("chat", code)
    assert samples(metrics)["segue_rejected_total"] == 1
