"""SegueConnector in real vLLM engines on CPUs: `make test-vllm`. Not a part of `make test`.

The model has two layers of random weights in float32. Decode's own answers, without a hand-off, are what each
answer must be equal to. Engines are started once for all tests; one that a test has killed is started again,
at the same port, when it is asked for the next time.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import (
    BLOCK,
    PYTHON,
    TO_PREFILL,
    Clients,
    Engine,
    make_adapter,
    make_model,
    prompts,
    transfer_config,
    unified,
)
from flipping_proxy import FlippingProxy
from vllm_api import RECORDED, difference, signatures

from ports import HeldPort

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON.exists(), reason="needs `make test-vllm`")]

REQUESTS = 200
TRANSPORTS = ["tcp", "shm"]
#: Prefill gives a room up after so many seconds.
ROOM_S = 20.0


class Engines:
    """The engines of this module, by name: `tcp` and `shm` have a prefill and a decode each; `few` and
    `fewshm` are prefills of 20 blocks over tcp and shm, `short` a pair of 20 blocks each; `strict` is a
    decode with the policy `fail`, behind a proxy that changes bytes; `lora` have LoRA adapters, `multi` a
    MultiConnector of ours and vLLM's ExampleConnector."""

    def __init__(self, model: Path, log: Path) -> None:
        self.log = log
        self._model = model
        self._ports = {
            name: HeldPort() for name in ("tcp", "shm", "few", "fewshm", "short", "strict", "lora", "multi")
        }
        self._query = {name: HeldPort() for name in self._ports if name != "strict"}
        self._running: dict[str, Engine] = {}
        self.proxy = FlippingProxy(self._ports["strict"].port)

    def named(self, *names: str) -> list[Engine]:
        """The engines `prefill-tcp` and so on; those that do not run are started, beside each other."""
        for name in names:
            found = self._running.get(name)
            if found is None or found.process.poll() is not None:
                if found is not None:
                    found.close()
                self._running[name] = self._start(name)
        return [self._running[name].wait() for name in names]

    def pair(self, kind: str) -> Clients:
        """Prefill and decode of one transport."""
        prefill, decode = self.named(f"prefill-{kind}", f"decode-{kind}")
        return Clients(prefill, decode, self._query[kind].port)

    def few(self, transport: str) -> Clients:
        """The prefill of few blocks, and the decode of this transport."""
        name = "few" if transport == "tcp" else "fewshm"
        prefill, decode = self.named(f"prefill-{name}", f"decode-{transport}")
        return Clients(prefill, decode, self._query[name].port)

    def close(self) -> None:
        """End all."""
        self.proxy.close()
        for engine in self._running.values():
            engine.close()

    def _start(self, name: str) -> Engine:
        side, kind = name.split("-")
        extra: dict[str, Any] = {"transport": ["shm" if kind.endswith("shm") else "tcp"], "room_s": ROOM_S}
        if side == "prefill":
            extra |= {"port": self._ports[kind].port, "query_port": self._query[kind].port}
        if kind == "strict":
            extra |= {"advertise_host": "127.0.0.2", "transport_port": self._ports[kind].port}
        role = "kv_producer" if side == "prefill" else "kv_consumer"
        config = transfer_config(role, "fail" if kind == "strict" else "recompute", **extra)
        more: dict[str, Any] = {}
        if kind.startswith("few"):
            more = {"num_gpu_blocks_override": 20, "max_model_len": 512}
        if kind == "short":
            more = {
                "num_gpu_blocks_override": 20,
                "max_model_len": 512,
                "long_prefill_token_threshold": BLOCK,
            }
        if kind == "lora":
            more = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        if kind == "multi":
            # ExampleConnector fails with prompts that are computed in chunks.
            more = {"max_num_batched_tokens": 2048}
            store = {"shared_storage_path": str(self.log / f"store-{side}")}
            example = {
                "kv_connector": "ExampleConnector",
                "kv_role": role,
                "kv_connector_extra_config": store,
            }
            config = {
                "kv_connector": "MultiConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [config, example]},
            }
        core = 0 if side == "prefill" else 1
        return Engine(name, core, self.log, model=str(self._model), kv_transfer_config=config, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(model, tmp_path_factory.mktemp("log"))
    try:
        yield made
    finally:
        made.close()


def ended(before: dict[str, int], engine: Engine) -> dict[str, int]:
    """How the hand-offs of an engine have ended since the outcomes `before`."""
    after = engine.counts()["outcomes"]
    return {code: count - before.get(code, 0) for code, count in after.items() if count != before.get(code)}


def params_of(clients: Clients, label: str, asked: list[list[int]]) -> list[dict[str, Any]]:
    """Prefill's answers, which a router gives to decode."""
    for number, tokens in enumerate(asked):
        clients.prefill.ask(f"{label}{number}", tokens, 1, TO_PREFILL)
    return [clients.prefill.answer(f"{label}{number}")["params"] for number in range(len(asked))]


def test_the_recorded_interface_is_that_of_the_installed_vllm() -> None:
    base = next(
        PYTHON.parent.parent.glob("lib/*/site-packages/vllm/distributed/kv_transfer/kv_connector/v1/base.py")
    )
    known: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    found = signatures(base.read_text())
    differences = {version: difference(recorded, found) for version, recorded in known.items()}
    assert [] in differences.values(), differences


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_are_those_of_one_engine(engines: Engines, transport: str) -> None:
    clients = engines.pair(transport)
    sides = (clients.prefill, clients.decode)
    asked = prompts(REQUESTS, seed=1)
    wanted = unified(clients.decode, "u", asked)
    # Answers that did not depend on the KV would be equal, too.
    assert len({tuple(answer) for answer in wanted}) > 0.9 * REQUESTS
    free = [engine.at_rest()["free_blocks"] for engine in sides]
    resting = []
    for half in (slice(0, REQUESTS // 2), slice(REQUESTS // 2, REQUESTS)):
        assert clients.sequential(f"s{half.start}-", asked[half]) == wanted[half]
        assert clients.concurrent(f"c{half.start}-", asked[half]) == wanted[half]
        resting.append([engine.at_rest() for engine in sides])
    assert ended({}, clients.decode) == {"OK": 2 * REQUESTS}
    for before, after, blocks in zip(*resting, free, strict=True):
        assert before["free_blocks"] == after["free_blocks"] == blocks
        assert after["descriptors"] <= before["descriptors"]
        assert after["threads"] <= before["threads"]


def test_clients_that_leave(engines: Engines) -> None:
    """In each state, on either side; both engines go on and are at rest after it."""
    clients = engines.pair("tcp")
    prefill, decode = clients.prefill, clients.decode
    asked = prompts(8, seed=2)
    wanted = unified(decode, "l-u", asked)
    for number, tokens in enumerate(asked):
        to_prefill, to_decode = clients.transfer(f"l{number}")
        decode.ask(f"l-d{number}", tokens, 8, to_decode)
        if number % 4 == 0:
            decode.send(abort=f"l-d{number}")
        prefill.ask(f"l-p{number}", tokens, 1, to_prefill)
        if number % 4 == 1:
            prefill.send(abort=f"l-p{number}")
        if number % 4 == 2:
            decode.send(abort=f"l-d{number}")
    for number in range(8):
        if number % 4 in (1, 3):
            assert decode.answer(f"l-d{number}")["tokens"] == wanted[number]
    # Prefill's answer is given to nobody: the room ends by its time.
    params_of(clients, "l-alone", asked[:1])
    for engine in (prefill, decode):
        engine.at_rest(ROOM_S + 20)
    assert clients.sequential("l-s", asked) == wanted


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefill_that_lacks_blocks(engines: Engines, transport: str) -> None:
    """4 prompts of 9 blocks in a pool of 20: it gives up rooms that no decode has, and requests wait. vLLM
    preempts none of them."""
    clients = engines.few(transport)
    asked = prompts(12, seed=3, low=8 * BLOCK + 1, high=9 * BLOCK)
    wanted = unified(clients.decode, "f-u", asked)
    assert clients.concurrent("f-c", asked, at_once=4) == wanted
    assert clients.sequential("f-s", asked, at_once=2) == wanted
    clients.prefill.at_rest(ROOM_S + 20)
    clients.decode.at_rest()


def test_requests_that_are_preempted(engines: Engines) -> None:
    """Two prompts of 9 blocks grow to 11 in a decode of 19 blocks; two of 11 are computed at once, 32 tokens
    a step, by a prefill of 19. Each side preempts the later one."""
    clients, (whole,) = engines.pair("short"), engines.named("decode-tcp")
    grow = prompts(6, seed=15, low=8 * BLOCK + 1, high=9 * BLOCK)
    long = prompts(6, seed=16, low=10 * BLOCK + 1, high=11 * BLOCK)
    wanted = [unified(whole, "t-u", grow, 64), unified(whole, "t-v", long)]
    assert clients.sequential("t-s", grow, at_once=2, count=64) == wanted[0]
    assert clients.decode.counts()["preempted"] > 0
    before = clients.prefill.counts()["preempted"]
    assert clients.concurrent("t-c", long, at_once=2) == wanted[1]
    assert clients.prefill.counts()["preempted"] > before
    clients.prefill.at_rest(ROOM_S + 20)
    clients.decode.at_rest()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_byte_that_changes_where_it_landed(engines: Engines, transport: str) -> None:
    """Decode computes the prompt itself; the same answer, and one hand-off that failed."""
    clients = engines.pair(transport)
    asked = prompts(2, seed=14)
    wanted = unified(clients.decode, "b-u", asked)
    before = clients.decode.counts()["outcomes"]
    clients.decode.send(flip=1)
    assert clients.sequential("b", asked) == wanted
    assert ended(before, clients.decode) == {"CHECKSUM_MISMATCH": 1, "OK": 1}
    for engine in (clients.prefill, clients.decode):
        engine.at_rest()


def test_a_byte_that_changes_on_the_wire(engines: Engines) -> None:
    """With the policy `fail` the client gets an error; decode's next request is well."""
    prefill, strict = engines.named("prefill-tcp", "decode-strict")
    clients = Clients(prefill, strict)
    asked = prompts(1, seed=15, low=190)
    wanted = unified(strict, "w-u", asked)
    engines.proxy.flips = 1
    [params] = params_of(clients, "w-p", asked)
    strict.ask("w-d", asked[0], 8, params)
    assert strict.answer("w-d")["reason"] == "error"
    assert engines.proxy.flips == 0
    assert ended({}, strict) == {"CHECKSUM_MISMATCH": 1}
    assert clients.sequential("w-s", asked) == wanted
    for engine in (prefill, strict):
        engine.at_rest()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_while_a_prefill_is_stopped(engines: Engines, transport: str) -> None:
    """Decode answers. Over tcp its blocks are free meanwhile. Over shm prefill writes into them itself, and
    they stay in quarantine until it goes on."""
    clients = engines.pair(transport)
    prefill, decode = clients.prefill, clients.decode
    asked = prompts(2, seed=12)
    wanted = unified(decode, "h-u", asked)
    assert clients.sequential("h-first", asked[:1]) == wanted[:1]
    [params] = params_of(clients, "h-p", asked[1:])
    prefill.kill(signal.SIGSTOP)
    decode.ask("h-d", asked[1], 8, params)
    assert decode.answer("h-d")["tokens"] == wanted[1]
    if transport == "tcp":
        decode.at_rest()
    else:
        assert decode.counts()["held"]["pinned"] == -(-len(asked[1]) // BLOCK)
    prefill.kill(signal.SIGCONT)
    for engine in (decode, prefill):
        engine.at_rest(ROOM_S + 20)
    assert clients.sequential("h-last", asked) == wanted


def test_while_a_decode_is_stopped(engines: Engines) -> None:
    """Prefill answers other decodes; the one that was stopped goes on with the KV or computes it."""
    clients = engines.pair("tcp")
    prefill, decode = clients.prefill, clients.decode
    [strict] = engines.named("decode-strict")
    asked = prompts(2, seed=16)
    wanted = unified(decode, "o-u", asked)
    params = params_of(clients, "o-p", asked)
    prefill.kill(signal.SIGSTOP)
    decode.ask("o-d", asked[0], 8, params[0])
    decode.counts()
    decode.kill(signal.SIGSTOP)
    prefill.kill(signal.SIGCONT)
    strict.ask("o-d", asked[1], 8, params[1])
    assert strict.answer("o-d")["tokens"] == wanted[1]
    decode.kill(signal.SIGCONT)
    assert decode.answer("o-d")["tokens"] == wanted[0]
    for engine in (prefill, decode, strict):
        engine.at_rest(ROOM_S + 20)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefill_that_is_killed_and_started_again(engines: Engines, transport: str) -> None:
    """With recompute each answer is the same, with fail it is an error. EngineCore of decode lives, and its
    blocks are free again. Params of before name a process that is not there any more."""
    clients = engines.pair(transport)
    prefill, decode = clients.prefill, clients.decode
    others = engines.named("decode-strict") if transport == "tcp" else []
    asked = prompts(3 + len(others), seed=4)
    wanted = unified(decode, "k-u", asked)
    before = decode.counts()["outcomes"]
    assert clients.sequential("k-first", asked[:1]) == wanted[:1]
    params = params_of(clients, "k-p", asked)
    prefill.kill(signal.SIGSTOP)
    decode.ask("k-stopped", asked[0], 8, params[0])
    decode.counts()
    for strict in others:
        strict.ask("k-stopped", asked[3], 8, params[3])
        strict.counts()
    prefill.kill()
    assert decode.answer("k-stopped")["tokens"] == wanted[0]
    for strict in others:
        assert strict.answer("k-stopped")["reason"] == "error"
        assert unified(strict, "k-u", asked[:1]) == wanted[:1]
        strict.at_rest()
    decode.ask("k-killed", asked[1], 8, params[1])
    assert decode.answer("k-killed")["tokens"] == wanted[1]
    decode.at_rest()
    again = engines.pair(transport)
    assert again.prefill is not prefill
    assert again.decode is decode
    decode.ask("k-again", asked[2], 8, params[2])
    assert decode.answer("k-again")["tokens"] == wanted[2]
    found = ended(before, decode)
    assert sum(found.values()) == 4
    assert found["OK"] == found["PEER_RESTARTED"] == 1
    assert again.sequential("k-last", asked) == wanted
    decode.at_rest()


def test_a_decode_that_is_killed_leaves_the_room_to_another_one(engines: Engines) -> None:
    clients = engines.pair("tcp")
    prefill, decode = clients.prefill, clients.decode
    [strict] = engines.named("decode-strict")
    asked = prompts(1, seed=6)
    before = strict.counts()["outcomes"]
    [params] = params_of(clients, "x-p", asked)
    prefill.kill(signal.SIGSTOP)
    decode.ask("x-d", asked[0], 8, params)
    decode.counts()
    decode.kill()
    decode.process.wait(20)
    prefill.kill(signal.SIGCONT)
    strict.ask("x-d", asked[0], 8, params)
    tokens = strict.answer("x-d")["tokens"]
    assert ended(before, strict) == {"OK": 1}
    assert [tokens] == unified(strict, "x-u", asked)
    prefill.at_rest(ROOM_S + 20)


def test_within_a_multi_connector(engines: Engines) -> None:
    """Beside vLLM's ExampleConnector, which writes each prompt's KV to a folder."""
    clients = engines.pair("multi")
    asked = prompts(8, seed=17)
    wanted = unified(clients.decode, "m-u", asked)
    before = clients.decode.counts()["outcomes"]
    assert clients.sequential("m-s", asked) == wanted
    assert clients.concurrent("m-c", asked) == wanted
    assert ended(before, clients.decode) == {"OK": 16}
    for engine in (clients.prefill, clients.decode):
        engine.at_rest()


def test_adapters_of_one_name_and_other_weights(engines: Engines, tmp_path: Path) -> None:
    """Of equal weights the KV is handed over, of others decode computes it."""
    clients = engines.pair("lora")
    prefill, decode = clients.prefill, clients.decode
    asked = prompts(1, seed=18)[0]
    one, other = (make_adapter(tmp_path / f"adapter{seed}", seed) for seed in (1, 2))
    answers = {}
    for number, (ours, theirs) in enumerate([(one, one), (one, other), (other, other)], start=1):
        # A number of its own for each adapter that vLLM loads.
        to_prefill = ["same-name", 1 + (ours is other), str(ours)]
        to_decode = ["same-name", 1 + (theirs is other), str(theirs)]
        before = decode.counts()["outcomes"]
        prefill.ask(f"a-p{number}", asked, 1, TO_PREFILL, lora=to_prefill)
        params = prefill.answer(f"a-p{number}")["params"]
        decode.ask(f"a-d{number}", asked, 8, params, lora=to_decode)
        answers[number] = decode.answer(f"a-d{number}")["tokens"]
        decode.ask(f"a-u{number}", asked, 8, lora=to_decode)
        assert answers[number] == decode.answer(f"a-u{number}")["tokens"]
        found = ended(before, decode)
        assert set(found) == ({"OK"} if ours is theirs else {"METADATA_MISMATCH"}), found
    assert answers[1] != answers[2] == answers[3]
    for engine in (prefill, decode):
        engine.at_rest(ROOM_S + 20)


def test_what_is_not_supported_ends_the_start(model: Path, tmp_path: Path) -> None:
    wrong = [
        ("kv_both", {}, "kv_role kv_both is not supported"),
        ("kv_producer", {"transports": ["tcp"]}, "did you mean transport?"),
    ]
    started = [
        Engine(
            f"wrong{i}", i % 2, tmp_path, model=str(model), kv_transfer_config=transfer_config(role, **extra)
        )
        for i, (role, extra, _) in enumerate(wrong)
    ]
    for engine, (_, _, sentence) in zip(started, wrong, strict=True):
        with pytest.raises(AssertionError, match="has ended"):
            engine.wait()
        assert sentence in engine.log.read_text()
