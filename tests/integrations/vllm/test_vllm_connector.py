"""`SegueConnector` as vLLM calls it, over stand-ins for vLLM's own classes (`vllm_doubles`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm_bench import TO_PREFILL, request
from vllm_doubles import ConnectorWorker, KVConnectorRole, connector_engine, kv_cache_config, vllm_config
from vllm_doubles import install as install_vllm
from vllm_model import ModelEngine, ModelPool
from vllm_pair import BLOCKS, expected, make_caches, run_step

from ports import HeldPort
from segue.integrations.vllm.vllm_params import engine_id
from segue.integrations.vllm.vllm_settings import LoadFailurePolicy
from segue.integrations.vllm.vllm_table import RequestEnd
from segue.kv import ConfigError, Incarnation, Internal, InvalidRequest, LeaderId, TransferFailed

TOKENS = 30


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install_vllm(monkeypatch)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def until(engines: list[ModelEngine], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        for engine in engines:
            run_step(engine)
        time.sleep(0.001)


def kv(engine: ModelEngine, name: str) -> torch.Tensor:
    worker = engine.worker
    assert isinstance(worker, ConnectorWorker)
    return worker.kv[name]


def at_rest(engines: list[ModelEngine]) -> None:
    until(engines, lambda: all(engine.at_rest for engine in engines))
    for engine in engines:
        held = {**engine.table.sizes(), **engine.worker.connector.sizes()}  # type: ignore[attr-defined]
        assert not {
            name: count
            for name, count in held.items()
            if count and name not in ("peers", "ended", "deadlines")
        }
        assert len(engine.pool.free) == BLOCKS


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_hand_off_from_one_connector_to_another(
    stack: ExitStack, module: Any, transport: str, concurrent: bool
) -> None:
    port = HeldPort()
    prefill = connector_engine(stack, module, "kv_producer", transport=[transport], query_port=port.port)
    decode = connector_engine(stack, module, "kv_consumer", transport=[transport])
    both = [prefill, decode]
    if concurrent:
        address = prefill.worker.connector.get_handshake_metadata()  # type: ignore[attr-defined]
        leader = LeaderId(Incarnation(address.incarnation), address.dp_rank)
        prefill.add(request("p1", TOKENS, {**TO_PREFILL, "transfer_id": "t"}))
        params: Any = {
            "do_remote_prefill": True,
            "transfer_id": "t",
            "remote_bootstrap_addr": f"127.0.0.1:{port.port}",
            "remote_engine_id": engine_id(leader),
        }
    else:
        prefill.add(request("p1", TOKENS, TO_PREFILL))
        until(both, lambda: "p1" in prefill.answers)
        params = prefill.answers["p1"]
    decode.add(request("d1", TOKENS, params))
    until(both, lambda: "d1" in decode.ends)
    assert decode.loaded == ["d1"]
    assert torch.equal(kv(decode, "d1"), expected(range(TOKENS)))
    at_rest(both)
    stats = decode.table.stats  # type: ignore[attr-defined]
    assert sum(found.data["outcomes"].get("OK", 0) for found in stats) == 1
    assert max(found.data["pinned"] for found in stats) == 8
    assert stats[-1].data["pinned"] == 0


def test_the_memory_of_a_gpu_goes_through_staging(
    stack: ExitStack, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each chunk waits for an event that was recorded behind its forward; the log says what has not run."""
    calls: list[str] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    more: Any = {"on_gpu": True, "device_memory": "unverified"}
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, "segue.vllm"):
        both = [connector_engine(stack, module, role, **more) for role in ("kv_producer", "kv_consumer")]
    assert sum("never run on a GPU" in message for message in caplog.messages) == 2
    assert sum("over staged_tcp" in message for message in caplog.messages) == 2
    prefill, decode = both
    prefill.add(request("p1", TOKENS, TO_PREFILL))
    until(both, lambda: "p1" in prefill.answers)
    decode.add(request("d1", TOKENS, prefill.answers["p1"]))
    until(both, lambda: "d1" in decode.ends)
    assert decode.loaded == ["d1"]
    assert torch.equal(kv(decode, "d1"), expected(range(TOKENS)))
    assert calls == ["record", "synchronize"]
    at_rest(both)
    with pytest.raises(ConfigError, match="device_memory"):
        connector_engine(stack, module, "kv_producer", on_gpu=True)
    with pytest.raises(ConfigError, match="mooncake"):
        connector_engine(stack, module, "kv_producer", transport=["mooncake"], **more)


def test_a_forward_that_raises_sends_nothing(stack: ExitStack, module: Any) -> None:
    """vLLM calls `wait_for_save` in a `finally`."""
    port = HeldPort()
    prefill, decode = both = [
        connector_engine(stack, module, "kv_producer", query_port=port.port, retain_s=0.0),
        connector_engine(stack, module, "kv_consumer"),
    ]
    assert isinstance(prefill.worker, ConnectorWorker)
    leader = prefill.worker.connector.get_handshake_metadata()
    decode.add(
        request(
            "d1",
            TOKENS,
            {
                "do_remote_prefill": True,
                "transfer_id": "t1",
                "remote_bootstrap_addr": f"http://127.0.0.1:{port.port}",
                "remote_engine_id": engine_id(LeaderId(Incarnation(leader.incarnation), leader.dp_rank)),
            },
        )
    )
    prefill.worker.raises = RuntimeError("the forward failed")
    prefill.add(request("p1", TOKENS, {**TO_PREFILL, "transfer_id": "t1"}))
    with pytest.raises(TransferFailed, match="the forward failed"):
        until(both, lambda: False)
    until([decode], lambda: "d1" in decode.ends)
    assert decode.loaded == []
    at_rest([decode])


def test_with_the_policy_fail_a_load_without_prefill_ends(
    stack: ExitStack, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])
    decode = connector_engine(stack, module, "kv_consumer", LoadFailurePolicy.FAIL, transport=["tcp"])
    with caplog.at_level(logging.WARNING, "segue.vllm"):
        decode.add(request("d1", TOKENS, {"do_remote_prefill": True}))
        until([decode], lambda: "d1" in decode.ends)
    assert decode.ends["d1"] is RequestEnd.ERROR
    assert [m for m in caplog.messages if "d1" in m and "not loaded" in m]
    at_rest([decode])


def test_a_preemption_reaches_the_table(stack: ExitStack, module: Any) -> None:
    prefill = connector_engine(stack, module, "kv_producer", transport=["tcp"], room_s=5)
    prefill.add(request("p1", TOKENS, {**TO_PREFILL, "transfer_id": "t"}))
    run_step(prefill)
    prefill.preempt(prefill.running.pop())
    prefill.table.step([], ["p1"])
    assert [type(order).__name__ for order in prefill.table.take_orders()] == ["AbortOrder"]
    until([prefill], lambda: "p1" in prefill.ends)


def test_both_sides_need_the_same_secret(stack: ExitStack, module: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of 16 bytes and more\n")
    more = {"transport": ["tcp"], "secret_file": str(secret)}
    prefill = connector_engine(stack, module, "kv_producer", **more)
    decode = connector_engine(stack, module, "kv_consumer", **more)
    prefill.add(request("p1", TOKENS, TO_PREFILL))
    until([prefill, decode], lambda: "p1" in prefill.answers)
    decode.add(request("d1", TOKENS, prefill.answers["p1"]))
    until([prefill, decode], lambda: "d1" in decode.ends)
    assert decode.loaded == ["d1"]
    (tmp_path / "empty").write_text("\n")
    for wrong in ("none", "empty"):
        with pytest.raises(ConfigError, match="secret_file"):
            module.SegueConnector(
                vllm_config("kv_producer", secret_file=str(tmp_path / wrong)),
                KVConnectorRole.SCHEDULER,
                kv_cache_config(),
            )


@pytest.mark.parametrize(
    ("role", "extra", "sentence"),
    [
        ("kv_both", {}, "kv_both is not supported"),
        ("kv_producer", {"transports": ["tcp"]}, "did you mean transport"),
    ],
)
def test_an_unsupported_configuration_ends_the_start(
    module: Any, role: str, extra: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        module.SegueConnector(vllm_config(role, **extra), KVConnectorRole.SCHEDULER, kv_cache_config())


def test_calls_that_vllm_must_make_first(module: Any) -> None:
    made = module.SegueConnector(vllm_config("kv_producer"), KVConnectorRole.SCHEDULER, kv_cache_config())
    with pytest.raises(Internal, match="block pool"):
        made.has_pending_push_work()
    with pytest.raises(Internal, match="did not register"):
        made.get_handshake_metadata()
    with pytest.raises(ConfigError, match="no KV cache"):
        made.register_kv_caches({})
    assert made.get_kv_connector_stats() is None
    assert made.sizes() == {}
    made.shutdown()
    made.bind_gpu_block_pool(ModelPool(BLOCKS))
    assert made.sizes()["pinned"] == 0
    made.set_xfer_handshake_metadata({0: object()})
    assert not module.SegueConnector.supports_sleep_mode(None)


def test_several_ranks_within_a_multi_connector_are_refused(module: Any) -> None:
    ranks = module.get_tp_group()
    ranks.world_size = 2
    made = module.SegueConnector(vllm_config("kv_producer"), KVConnectorRole.WORKER, kv_cache_config())
    with pytest.raises(ConfigError, match="MultiConnector with --tensor-parallel-size"):
        made.register_kv_caches(make_caches()[0])


def test_metadata_of_another_connector_is_a_bug(stack: ExitStack, module: Any) -> None:
    engine = connector_engine(stack, module, "kv_consumer", transport=["tcp"])
    with pytest.raises(Internal, match="metadata of another connector: object"):
        engine.worker.connector.bind_connector_metadata(object())  # type: ignore[attr-defined]
    with pytest.raises(Internal, match="two workers"):
        module.SegueReports(b"", []).aggregate(module.SegueReports(b"", []))


@pytest.mark.parametrize(("transport", "shared"), [([], True), (["shm"], True), (["tcp"], False)])
def test_the_pool_is_shared_memory_where_shm_may_be_used(
    module: Any, transport: list[str], shared: bool
) -> None:
    config = vllm_config("kv_producer", transport=transport)
    made = module.SegueConnector(config, KVConnectorRole.WORKER, kv_cache_config())
    assert (made.get_mem_pool_context() is not None) is shared


def test_segues_log_goes_where_vllms_goes_and_clients_text_in_it_is_escaped(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = logging.getLogger("segue"), logging.getLogger("vllm")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "level", logging.DEBUG)
    module.SegueConnector(vllm_config("kv_producer"), KVConnectorRole.WORKER, kv_cache_config())
    assert own.level == logging.DEBUG
    module.SegueConnector(vllm_config("kv_producer"), KVConnectorRole.WORKER, kv_cache_config())
    assert len(own.handlers) == 1
    logging.getLogger("segue.vllm").warning("%s", "\x1b[2J\r\nERROR forged")
    try:
        raise InvalidRequest("a name with \x9b")
    except InvalidRequest:
        logging.getLogger("segue.kv").exception("a room")
    assert lines[0] == r"\x1b[2J\r\nERROR forged"
    assert lines[1].startswith("a room\nTraceback")
    assert lines[1].endswith(r"a name with \x9b")


# ---- metrics -----------------------------------------------------------------------------------------


def figures(**changes: Any) -> dict[str, Any]:
    plain = {
        "steps": 1,
        "outcomes": {"OK": 1},
        "nbytes": [100],
        "wire_s": [0.002],
        "pinned": 4,
        "quarantined": 1,
    }
    return {**plain, **changes}


def test_stats_add_up_and_reduce_to_a_line(module: Any) -> None:
    make = module.SegueConnector.build_kv_connector_stats
    total = make()
    assert total.is_empty()
    total.aggregate(make(figures()))
    total.aggregate(
        make(
            figures(outcomes={"OK": 1, "PEER_LOST": 2}, nbytes=[300], wire_s=[0.004], pinned=2, quarantined=0)
        )
    )
    assert not total.is_empty()
    assert total.reduce() == {
        "segue hand-offs": 2,
        "failed": 2,
        "MB": 0.0,
        "mean ms": 3.0,
        "max ms": 4.0,
        "blocks pinned": 2,
        "in quarantine": 0,
    }
    total.reset()
    assert total.is_empty()
    assert total.reduce()["mean ms"] == total.reduce()["max ms"] == 0


def test_vllms_metrics_have_the_figures(module: Any) -> None:
    registry = CollectorRegistry()

    def kind(metric: Any) -> Any:
        return lambda **options: metric(registry=registry, **options)

    types = {metric: kind(metric) for metric in (Counter, Gauge, Histogram)}
    metrics = module.SegueConnector.build_prom_metrics(None, types, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe(figures(), 0)
    metrics.observe(figures(outcomes={"PEER_LOST": 2}, pinned=0, quarantined=0), 1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:segue_{name}", labels)

    assert value("handoffs_total", engine="0", outcome="OK") == 1
    assert value("handoffs_total", engine="1", outcome="PEER_LOST") == 2
    assert value("kv_bytes_total", engine="0") == 100
    assert value("transfer_seconds_sum", engine="0") == pytest.approx(0.002)
    assert (value("pinned_blocks", engine="0"), value("quarantined_blocks", engine="0")) == (4, 1)
    assert (value("pinned_blocks", engine="1"), value("quarantined_blocks", engine="1")) == (0, 0)
