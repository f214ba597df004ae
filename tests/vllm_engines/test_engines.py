"""SegueConnector in real vLLM engines on CPUs: `make test-vllm`. Not a part of `make test`.

The model has two layers of random weights in float32. Decode's own answers, without a hand-off, are what each
answer must be equal to.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, PYTHON, TO_PREFILL, Clients, Engine, make_model, prompts, transfer_config, unified
from vllm_api import RECORDED, difference, signatures

from ports import HeldPort

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON.exists(), reason="needs `make test-vllm`")]

REQUESTS = 100
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start an engine: `start(role, transport, core=…, policy=…, arguments={…}, **extra_config)`."""
    with ExitStack() as stack:

        def begin(
            role: str,
            *,
            name: str = "",
            core: int | None = None,
            policy: str = "recompute",
            arguments: Any = None,
            **extra: Any,
        ) -> Engine:
            where = (0 if role == "kv_producer" else 1) if core is None else core
            config = transfer_config(role, policy, **extra)
            engine = Engine(
                name or role,
                where,
                tmp_path,
                model=str(model),
                kv_transfer_config=config,
                **(arguments or {}),
            )
            stack.callback(engine.close)
            return engine

        yield begin


def loaded(decode: Engine) -> int:
    """Hand-offs that succeeded; no other one may have ended."""
    outcomes = decode.counts()["outcomes"]
    assert set(outcomes) <= {"OK"}, outcomes
    return int(outcomes.get("OK", 0))


def test_the_recorded_interface_is_that_of_the_installed_vllm() -> None:
    base = next(
        PYTHON.parent.parent.glob("lib/*/site-packages/vllm/distributed/kv_transfer/kv_connector/v1/base.py")
    )
    known: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    found = signatures(base.read_text())
    differences = {version: difference(recorded, found) for version, recorded in known.items()}
    assert [] in differences.values(), differences


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_answers_are_those_of_one_engine(start: Start, transport: str) -> None:
    port = HeldPort()
    prefill = start("kv_producer", transport=[transport], query_port=port.port)
    decode = start("kv_consumer", transport=[transport])
    clients = Clients(prefill, decode, port.port)
    asked = prompts(REQUESTS, seed=1)
    wanted = unified(decode, "u", asked)
    # Answers that did not depend on the KV would be equal, too.
    assert len({tuple(answer) for answer in wanted}) > 0.9 * REQUESTS
    free = [engine.at_rest()["free_blocks"] for engine in (prefill, decode)]
    resting = []
    for half in (slice(0, REQUESTS // 2), slice(REQUESTS // 2, REQUESTS)):
        assert clients.sequential(f"s{half.start}-", asked[half]) == wanted[half]
        assert clients.concurrent(f"c{half.start}-", asked[half]) == wanted[half]
        resting.append([engine.at_rest() for engine in (prefill, decode)])
    assert loaded(decode) == 2 * REQUESTS
    for before, after, blocks in zip(*resting, free, strict=True):
        assert before["free_blocks"] == after["free_blocks"] == blocks
        assert after["descriptors"] <= before["descriptors"]
        assert after["threads"] <= before["threads"]


def test_clients_that_leave(start: Start) -> None:
    """In each state, on either side; both engines go on and are at rest after it."""
    port = HeldPort()
    prefill = start("kv_producer", transport=["tcp"], query_port=port.port, room_s=5.0)
    decode = start("kv_consumer", transport=["tcp"], room_s=5.0)
    clients = Clients(prefill, decode, port.port)
    asked = prompts(8, seed=2)
    wanted = unified(decode, "u", asked)
    engine_id = clients.engine_id()
    for number, tokens in enumerate(asked):
        transfer = {"transfer_id": f"t{number}"}
        to_decode = {
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://127.0.0.1:{port.port}",
            "remote_engine_id": engine_id,
            **transfer,
        }
        decode.ask(f"d{number}", tokens, 8, to_decode)
        if number % 4 == 0:
            decode.send(abort=f"d{number}")
        prefill.ask(f"p{number}", tokens, 1, {**TO_PREFILL, **transfer})
        if number % 4 == 1:
            prefill.send(abort=f"p{number}")
        if number % 4 == 2:
            decode.send(abort=f"d{number}")
    for number in range(8):
        if number % 4 in (1, 3):
            assert decode.answer(f"d{number}")["tokens"] == wanted[number]
    # Prefill's answer is given to nobody: the room ends by its time.
    prefill.ask("alone", asked[0], 1, TO_PREFILL)
    prefill.answer("alone")
    for engine in (prefill, decode):
        engine.at_rest()
    assert clients.sequential("s", asked) == wanted


def test_a_prefill_that_lacks_blocks(start: Start) -> None:
    """It preempts: 4 prompts of 9 blocks in a pool of 20."""
    port = HeldPort()
    arguments = {"num_gpu_blocks_override": 20, "max_model_len": 512}
    prefill = start("kv_producer", transport=["tcp"], query_port=port.port, room_s=5.0, arguments=arguments)
    decode = start("kv_consumer", transport=["tcp"], room_s=5.0)
    clients = Clients(prefill, decode, port.port)
    asked = prompts(12, seed=3, low=8 * BLOCK + 1, high=9 * BLOCK)
    wanted = unified(decode, "u", asked)
    assert clients.concurrent("c", asked, at_once=4) == wanted
    assert clients.sequential("s", asked, at_once=2) == wanted
    prefill.at_rest()
    decode.at_rest()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_prefill_that_is_stopped_then_killed(start: Start, transport: str) -> None:
    """With recompute the answer is the same; EngineCore of decode lives, and its blocks are free again."""
    asked = prompts(2, seed=4)
    prefill = start("kv_producer", transport=[transport])
    decode = start("kv_consumer", transport=[transport])
    clients = Clients(prefill, decode)
    wanted = unified(decode, "u", asked)
    assert clients.sequential("first", asked) == wanted
    for number, tokens in enumerate(asked):
        prefill.ask(f"p{number}", tokens, 1, TO_PREFILL)
    params = [prefill.answer(f"p{number}")["params"] for number in range(2)]
    prefill.kill(signal.SIGSTOP)
    decode.ask("stopped", asked[0], 8, params[0])
    decode.counts()
    prefill.kill()
    assert decode.answer("stopped")["tokens"] == wanted[0]
    decode.ask("killed", asked[1], 8, params[1])
    assert decode.answer("killed")["tokens"] == wanted[1]
    counts = decode.at_rest()
    assert counts["outcomes"]["OK"] == 2
    assert sum(counts["outcomes"].values()) == 4


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_while_a_prefill_is_stopped(start: Start, transport: str) -> None:
    """Decode answers. Over tcp its blocks are free meanwhile. Over shm prefill writes into them itself, and
    they stay in quarantine until it goes on."""
    asked = prompts(2, seed=12)
    prefill = start("kv_producer", transport=[transport])
    decode = start("kv_consumer", transport=[transport])
    clients = Clients(prefill, decode)
    wanted = unified(decode, "u", asked)
    assert clients.sequential("first", asked[:1]) == wanted[:1]
    prefill.ask("p", asked[1], 1, TO_PREFILL)
    params = prefill.answer("p")["params"]
    prefill.kill(signal.SIGSTOP)
    decode.ask("d", asked[1], 8, params)
    assert decode.answer("d")["tokens"] == wanted[1]
    if transport == "tcp":
        decode.at_rest()
    else:
        assert decode.counts()["held"]["pinned"] == -(-len(asked[1]) // BLOCK)
    prefill.kill(signal.SIGCONT)
    for engine in (decode, prefill):
        engine.at_rest(within_s=70)
    assert clients.sequential("last", asked) == wanted


def test_with_the_policy_fail_a_lost_load_is_an_error(start: Start) -> None:
    asked = prompts(1, seed=5)
    prefill = start("kv_producer", transport=["tcp"])
    decode = start("kv_consumer", transport=["tcp"], policy="fail")
    prefill.ask("p", asked[0], 1, TO_PREFILL)
    params = prefill.answer("p")["params"]
    prefill.kill()
    decode.ask("d", asked[0], 8, params)
    assert decode.answer("d")["reason"] == "error"
    assert len(unified(decode, "u", asked)[0]) == 8
    decode.at_rest()


def test_a_decode_that_is_killed_leaves_the_room_to_another_one(start: Start) -> None:
    asked = prompts(1, seed=6)
    prefill = start("kv_producer", transport=["tcp"], retain_s=30.0)
    decode = start("kv_consumer", transport=["tcp"])
    prefill.ask("p", asked[0], 1, TO_PREFILL)
    params = prefill.answer("p")["params"]
    prefill.kill(signal.SIGSTOP)
    decode.ask("d", asked[0], 8, params)
    decode.counts()
    decode.kill()
    decode.process.wait(20)
    prefill.kill(signal.SIGCONT)
    other = start("kv_consumer", name="other", transport=["tcp"])
    other.ask("d", asked[0], 8, params)
    tokens = other.answer("d")["tokens"]
    assert loaded(other) == 1
    assert [tokens] == unified(other, "u", asked)
    prefill.at_rest(within_s=60)


def test_a_prefill_that_was_started_again(start: Start) -> None:
    """At the same port; params of before are those of another process."""
    asked, port = prompts(1, seed=7), HeldPort()
    prefill = start("kv_producer", transport=["tcp"], port=port.port)
    prefill.ask("p", asked[0], 1, TO_PREFILL)
    params = prefill.answer("p")["params"]
    prefill.kill()
    prefill.process.wait(20)
    again = start("kv_producer", name="again", transport=["tcp"], port=port.port)
    decode = start("kv_consumer", transport=["tcp"])
    decode.ask("d", asked[0], 8, params)
    tokens = decode.answer("d")["tokens"]
    assert decode.counts()["outcomes"] == {"PEER_RESTARTED": 1}
    clients = Clients(again, decode)
    assert [tokens] == unified(decode, "u", asked) == clients.sequential("s", asked)
    decode.at_rest()


def test_what_is_not_supported_ends_the_start(model: Path, tmp_path: Path) -> None:
    for role, extra, sentence in (
        ("kv_both", {}, "kv_role kv_both is not supported"),
        ("kv_producer", {"transports": ["tcp"]}, "did you mean transport?"),
    ):
        with pytest.raises(AssertionError, match="has ended"):
            Engine("wrong", 0, tmp_path, model=str(model), kv_transfer_config=transfer_config(role, **extra))
        assert sentence in (tmp_path / "wrong.log").read_text()
