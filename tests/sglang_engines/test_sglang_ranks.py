"""Real SGLang engines on CPUs in other forms: tensor and data parallelism, overlap scheduling, retraction."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from sglang_sides import Side, Sides, prompts, until
from transformers import AutoModelForCausalLM, DeepseekV2Config

from segue.engine.models.model_store import DEFAULT_MODEL, resolve_model

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(600)]
#: ranks that wait for each other spin: on few cores a step takes seconds
OPTIONS = {"dtype": "float32", "wait_s": 120}


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.close()


def answers(
    prefill: Side,
    decode: Side,
    asked: list[str],
    rooms: list[int],
    at_prefill: dict[str, int] | None = None,
    at_decode: dict[str, int] | None = None,
) -> list[dict[str, object]]:
    """The answers of both legs, whose requests have more options."""
    legs = [(prefill, at_prefill or {}), (decode, at_decode or {})]
    jobs = [(side, side.ask(asked, rooms, tokens=4, more=options)) for side, options in legs]
    return [side.answer(job) for side, job in jobs]


def digests(sides: Sides, room: int, role: str) -> list[list[str]]:
    """The digests of the pages of a room on all ranks."""
    lines = map(json.loads, (sides.folder / "digests").read_text().splitlines())
    return sorted(line["pages"] for line in lines if (line["room"], line["role"]) == (room, role))


def test_26394_a_rank_that_is_late_holds_the_others_and_one_that_fails_fails_all(sides: Sides) -> None:
    """Three ranks on each side. Rank 1 of prefill fails a second after the others have succeeded: the request
    fails on all ranks of both sides, and the next one is answered."""
    prefill, decode = (sides.start(role, tp_size=3, **OPTIONS) for role in ("prefill", "decode"))
    for side in (prefill, decode):
        side.answer()
    asked = ["the capital of France is", "a river flows through"]
    rooms = sides.rooms(2)
    prefilled, decoded = answers(prefill, decode, asked, rooms)
    assert "error" not in prefilled, prefilled
    assert "error" not in decoded, decoded
    for room in rooms:
        stored, landed = (digests(sides, room, role) for role in ("prefill", "decode"))
        assert len(stored) == 3
        assert stored == landed
    (sides.folder / "fail-1").touch()
    [room] = sides.rooms(1)
    failed = answers(prefill, decode, asked[:1], [room])
    assert all("error" in answer for answer in failed), failed
    assert not (sides.folder / "fail-1").exists()
    assert len(digests(sides, room, "decode")) == 2
    until(lambda: "a rank of the test" in decode.log.read_text())
    again = answers(prefill, decode, asked, sides.rooms(2))
    assert again[1]["texts"] == decoded["texts"]
    until(lambda: all(not tables["halves"] for tables in sides.sizes().values()))


def halves(sides: Sides, role: str) -> list[dict[str, Any]]:
    """The halves of this role that succeeded, in their order."""
    lines = map(json.loads, (sides.folder / "digests").read_text().splitlines())
    return [line for line in lines if line["role"] == role]


def test_two_dp_ranks_of_prefill(sides: Sides) -> None:
    """Prefill spreads its requests by turns; decode asks its bootstrap server which rank has a room. A hint
    names the rank, and one that names the wrong rank ends the request on both sides."""
    spread = {"dp_size": 2, "load_balance_method": "round_robin"}
    prefill, decode = (
        sides.start(role, **OPTIONS, **(spread if role == "prefill" else {}))
        for role in ("prefill", "decode")
    )
    for side in (prefill, decode):
        side.answer()
    rooms = sides.rooms(6)
    found = answers(prefill, decode, prompts()[:6], rooms)
    assert all("error" not in answer for answer in found), found
    for room in rooms:
        assert digests(sides, room, "prefill") == digests(sides, room, "decode")
    assert len({half["pid"] for half in halves(sides, "prefill")}) == 2
    hint = {"disagg_prefill_dp_rank": 1}
    rooms = sides.rooms(4)
    found = answers(prefill, decode, prompts()[6:10], rooms, hint | {"routed_dp_rank": 1}, hint)
    assert all("error" not in answer for answer in found), found
    for room in rooms:
        assert digests(sides, room, "prefill") == digests(sides, room, "decode")
    assert len({half["pid"] for half in halves(sides, "prefill") if half["room"] in rooms}) == 1
    wrong = hint | {"routed_dp_rank": 0}
    found = answers(prefill, decode, prompts()[10:11], sides.rooms(1), wrong, hint)
    assert all("DP_RANK_CONFLICT" in str(answer.get("error")) for answer in found), found
    found = answers(prefill, decode, prompts()[11:12], sides.rooms(1))
    assert all("error" not in answer for answer in found), found
    until(lambda: all(not tables["halves"] for tables in sides.sizes().values()))


def test_ranks_that_follow_the_room_with_overlap_scheduling(sides: Sides) -> None:
    """`follow_bootstrap_room`, SGLang's default: the room names the rank of prefill, and nobody is asked.

    SGLang computes a batch while it handles the results of the one before. The second prompts begin with a
    prefix that prefill has.
    """
    options = OPTIONS | {"disable_overlap_schedule": False}
    prefill, decode = (
        sides.start(role, **options, **({"dp_size": 2} if role == "prefill" else {}))
        for role in ("prefill", "decode")
    )
    for side in (prefill, decode):
        side.answer()
    for asked in (prompts()[:6], prompts()[40:46]):
        rooms = [room & ~1 | number % 2 for number, room in enumerate(sides.rooms(6))]
        found = answers(prefill, decode, asked, rooms)
        assert all("error" not in answer for answer in found), found
        for room in rooms:
            assert digests(sides, room, "prefill") == digests(sides, room, "decode")
    of_rank = [
        {half["pid"] for half in halves(sides, "prefill") if half["room"] % 2 == odd} for odd in (0, 1)
    ]
    assert [len(pids) for pids in of_rank] == [1, 1]
    assert of_rank[0] != of_rank[1]


def test_retracted_requests_go_on_from_their_backup(sides: Sides) -> None:
    """Decode takes the memory of one request each fourth step, and copies its KV back later."""
    prefill = sides.start("prefill", **OPTIONS)
    decode = sides.start("decode", retract_each=4, **OPTIONS)
    for side in (prefill, decode):
        side.answer()
    asked = prompts()[:5]

    def texts(batch: list[str]) -> list[str]:
        rooms = sides.rooms(len(batch))
        jobs = [(side, side.ask(batch, rooms, tokens=16)) for side in (prefill, decode)]
        found = [side.answer(job) for side, job in jobs]
        assert all("error" not in answer for answer in found), found
        return found[1]["texts"]

    alone = [texts([one])[0] for one in asked]  # a request that is alone keeps its memory
    assert "#retracted_reqs: 1" not in decode.log.read_text()
    assert texts(asked) == alone
    assert decode.log.read_text().count("#retracted_reqs: 1") >= 3
    until(lambda: all(not tables["halves"] for tables in sides.sizes().values()))
    assert "leak" not in decode.log.read_text()


def test_paused_requests_are_computed_again_on_their_dp_rank(sides: Sides) -> None:
    """A pause of decode takes the memory of all requests, as before new weights; then it asks prefill over
    HTTP to compute them again in their rooms. Two DP ranks of prefill, by turns."""
    spread = {"dp_size": 2, "load_balance_method": "round_robin"}
    prefill, decode = (
        sides.start(role, http=True, **OPTIONS, **(spread if role == "prefill" else {}))
        for role in ("prefill", "decode")
    )
    for side in (prefill, decode):
        side.answer()
    threads = ThreadPoolExecutor(8)

    def post(side: Side, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{side.port}/{path}", json=body, timeout=240.0)

    def begin(rooms: list[int]) -> list[Future[httpx.Response]]:
        leg = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 31098}
        begun = []
        for text, room in zip(prompts(), rooms, strict=False):
            body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
            body |= leg | {"bootstrap_room": room}
            threads.submit(post, prefill, "generate", body)
            begun.append(threads.submit(post, decode, "generate", body))
        return begun

    def texts(begun: list[Future[httpx.Response]]) -> list[str]:
        found = [answer.result() for answer in begun]
        assert [answer.status_code for answer in found] == [200] * 3, [answer.text for answer in found]
        return [answer.json()["text"] for answer in found]

    wanted = texts(begin(sides.rooms(3)))
    rooms = sides.rooms(3)
    begun = begin(rooms)
    until(lambda: {half["room"] for half in halves(sides, "decode")} >= {*rooms})
    assert post(decode, "pause_generation", {"mode": "retract"}).status_code == 200
    assert post(decode, "continue_generation", {}).status_code == 200
    assert texts(begun) == wanted
    for room in rooms:
        first, again = (
            [half for half in halves(sides, role) if half["room"] == room] for role in ("prefill", "decode")
        )
        assert len(first) == len(again) == 2
        assert {half["pid"] for half in first} == {first[0]["pid"]}
        assert [half["pages"] for half in first] == [half["pages"] for half in again]
    until(lambda: all(not tables["halves"] for tables in sides.sizes().values()))
    threads.shutdown()


def mla_model(folder: Path) -> Path:
    """A small model of DeepSeek-V2's form with random weights, and the tokenizer of the default model."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 49152, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 32, "q_lora_rank": None}
    latent = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
    experts = {"n_routed_experts": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"original_max_position_embeddings": 512, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = DeepseekV2Config(
        **sizes, **heads, **latent, **experts, rope_parameters=yarn, initializer_range=0.3, eos_token_id=0
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in resolve_model(DEFAULT_MODEL, progress=lambda *_: None).glob("*token*"):
        shutil.copy(file, folder)
    return folder


def test_an_mla_model(sides: Sides) -> None:
    """Two engines answer as one does, and each page on decode has the bytes that prefill stored."""
    options = OPTIONS | {"mla": True, "model": mla_model(sides.folder / "model")}
    asked = prompts()[:6]
    one, prefill, decode = (sides.start(role, **options) for role in ("null", "prefill", "decode"))
    for side in (one, prefill, decode):
        side.answer()
    wanted = one.answer(one.ask(asked, tokens=4))["texts"]
    rooms = sides.rooms(6)
    found = answers(prefill, decode, asked, rooms)
    assert all("error" not in answer for answer in found), found
    assert found[1]["texts"] == wanted
    for room in rooms:
        assert digests(sides, room, "prefill") == digests(sides, room, "decode")
    until(lambda: all(not tables["halves"] for tables in sides.sizes().values()))
