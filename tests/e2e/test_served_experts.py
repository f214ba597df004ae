"""`segue serve` with a mixture-of-experts model whose experts the DP ranks of an instance share out."""

from __future__ import annotations

import os
import random
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import tiny_model
from engine_models import BASE, GROUPS, LATENT, generate
from served import Served
from transformers import DeepseekV3Config, MixtralConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS = ("--dtype", "float32", "--kv-gib", "0.1", "--threads-per-worker", "1", "--port", "0")
COUNT = 8
DRAW = random.Random(3)
PROMPTS = [[DRAW.randrange(3, 250) for _ in range(n)] for n in (1, 16, 17, 64, 100, 300)]
#: What ends by itself stays away; `chaos/test_serve_restarts.py` has the rest.
NEVER = ("--restart", "never")
TWO = ("--prefill-dp", "2", "--enable-expert-parallel")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    more = {"vocab_size": tiny_model.VOCAB, "initializer_range": 0.2}
    configs = {
        "mixtral": MixtralConfig(**BASE | more, num_local_experts=4, sliding_window=None),
        "deepseek": DeepseekV3Config(**LATENT | GROUPS | more),
    }
    return {name: tiny_model.save(tmp_path_factory.mktemp(name), one) for name, one in configs.items()}


def ask(url: str, prompt: list[int], count: int = COUNT, **fields: Any) -> httpx.Response:
    body = {"model": "moe", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True} | fields, timeout=120)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def served(folder: Path, *arguments: str, wait: bool = True) -> Served:
    return Served("--model", str(folder), "--served-model-name", "moe", *OPTIONS, *arguments, wait=wait)


def test_experts_of_two_prefill_and_two_decode_ranks_answer_as_the_reference_does(
    folders: dict[str, Path],
) -> None:
    folder = folders["mixtral"]
    wanted = generate(folder, PROMPTS, COUNT)
    with (
        served(folder, *TWO, "--decode-dp", "2", "--chunk-tokens", "64") as made,
        ThreadPoolExecutor(6) as pool,
    ):
        # One rank of each side has all the work, and the other one none.
        for way in ({"disagg_prefill_dp_rank": 0, "routed_dp_rank": 1}, {"disagg_prefill_dp_rank": 1}):
            assert [tokens(ask(made.url, prompt, **way)) for prompt in PROMPTS[:3]] == wanted[:3], way
        # Both of them, with prompts and answers of unequal lengths.
        assert list(pool.map(lambda prompt: tokens(ask(made.url, prompt)), PROMPTS * 2)) == wanted * 2
        made.at_rest()
        assert made.stop() == 0
        assert not re.search(r"a rank of this replica is lost|unfinished", made.log())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "prefill", "decode", "transport"),
    [("deepseek", "2", "1", "tcp"), ("mixtral", "1", "3", "shm")],
)
def test_only_one_side_may_have_several_ranks(
    model: str, prefill: str, decode: str, transport: str, folders: dict[str, Path]
) -> None:
    sizes = ("--prefill-dp", prefill, "--decode-dp", decode, "--enable-expert-parallel")
    wanted = generate(folders[model], PROMPTS, COUNT)
    with served(folders[model], *sizes, "--transport", transport) as made, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda prompt: tokens(ask(made.url, prompt)), PROMPTS)) == wanted
        assert made.stop() == 0


def streaming(
    made: Served, pool: ThreadPoolExecutor, prompt: list[int], count: int
) -> Future[httpx.Response]:
    """A long answer, of which the first tokens are on their way when this returns."""
    answer = pool.submit(ask, made.url, prompt, count)
    with httpx.stream(
        "POST",
        f"{made.url}/v1/completions",
        json={"model": "moe", "prompt": prompt, "stream": True},
        timeout=60,
    ) as beside:
        next(beside.iter_lines())
    return answer


def test_a_killed_rank_ends_its_instance_and_another_one_continues_its_requests(
    folders: dict[str, Path],
) -> None:
    folder = folders["mixtral"]
    wanted = generate(folder, PROMPTS, 200)
    sizes = ("--decode", "2", "--decode-dp", "2", "--enable-expert-parallel", *NEVER)
    with served(folder, *sizes) as made, ThreadPoolExecutor(6) as pool:
        answers = [streaming(made, pool, prompt, 200) for prompt in PROMPTS]
        victim = made.instances("decode")[0]
        os.kill(victim.pid, signal.SIGKILL)
        assert [tokens(answer.result(120)) for answer in answers] == wanted
        # The other rank of its instance has left by itself; the other instance serves on.
        made.logged(re.compile(r"event=died child=decode-0"), 2, within_s=30)
        made.logged(re.compile(r"a rank of this replica is lost: .*DP rank \d"), 1)
        assert len(made.instances("decode")) == 2
        assert tokens(ask(made.url, PROMPTS[0])) == wanted[0][:COUNT]
        made.at_rest()
        made.terminate()
        made.forget()


def test_a_stopped_rank_ends_its_instance_within_its_silence_and_another_one_continues_its_requests(
    folders: dict[str, Path],
) -> None:
    folder = folders["mixtral"]
    wanted = generate(folder, PROMPTS[:3], 200)
    sizes = ("--decode", "2", "--decode-dp", "2", "--enable-expert-parallel", *NEVER)
    with served(folder, *sizes) as made, ThreadPoolExecutor(6) as pool:
        answers = [streaming(made, pool, prompt, 200) for prompt in PROMPTS[:3]]
        victim = made.instances("decode")[0]
        os.kill(victim.pid, signal.SIGSTOP)
        assert [tokens(answer.result(120)) for answer in answers] == wanted
        made.logged(
            re.compile(r"a rank of this replica is lost: .*has said nothing for 10\.\d s"), 1, within_s=60
        )
        assert tokens(ask(made.url, PROMPTS[0])) == wanted[0][:COUNT]
        os.kill(victim.pid, signal.SIGCONT)
        made.logged(re.compile(r"event=died child=decode-0"), 2, within_s=60)
        made.terminate()
        made.forget()


@pytest.mark.soak
def test_without_another_instance_each_request_ends_typed_and_the_service_with_status_1(
    folders: dict[str, Path],
) -> None:
    with served(folders["mixtral"], *TWO, *NEVER) as made, ThreadPoolExecutor(6) as pool:
        answers = [streaming(made, pool, prompt, 2000) for prompt in PROMPTS[:2]]
        prompts = [pool.submit(ask, made.url, [7] * 3000, 1) for _ in range(4)]
        os.kill(made.instances("prefill")[1].pid, signal.SIGKILL)
        assert made.process.wait(60) == 1
        for answer in [*answers, *prompts]:
            try:
                got = answer.result(60)
            except httpx.HTTPError:
                continue  # the service ended while it answered
            assert got.status_code == 200 or got.json()["error"]["code"], got.text
        assert "nothing can serve any more: no prefill is left" in made.log()
        made.forget()


@pytest.mark.soak
def test_when_one_rank_is_told_to_leave_all_do_and_none_loses_a_request(folders: dict[str, Path]) -> None:
    folder = folders["mixtral"]
    wanted = generate(folder, PROMPTS[3:5], 300)
    with served(folder, "--decode", "2", "--decode-dp", "2", "--enable-expert-parallel") as made:
        with ThreadPoolExecutor(6) as pool:
            answers = [streaming(made, pool, prompt, 300) for prompt in PROMPTS[3:5]]
            made.instances("decode")[0].terminate()
            assert [tokens(answer.result(120)) for answer in answers] == wanted
        lines = made.logged(re.compile(r"event=left child=decode-0.* how='exit status 0'"), 2, within_s=60)
        assert len(lines) == 2
        assert not re.search(r"a rank of this replica is lost|unfinished", made.log())
        assert tokens(ask(made.url, PROMPTS[3])) == wanted[0][:COUNT]


def test_ranks_that_share_experts_change_their_role_together_and_lose_nothing(
    folders: dict[str, Path],
) -> None:
    folder = folders["mixtral"]
    wanted = generate(folder, PROMPTS, COUNT)
    sizes = ("--prefill", "2", "--prefill-dp", "2", "--decode-dp", "2", "--enable-expert-parallel", *NEVER)
    with served(folder, *sizes) as made, ThreadPoolExecutor(6) as pool:
        processes = {child.pid for role in ("prefill", "decode") for child in made.instances(role)}
        answers = [streaming(made, pool, prompt, COUNT) for prompt in PROMPTS]
        moved = names(made, "prefill")[-1]
        [stayed] = names(made, "decode")
        # Both kinds of instances: who was prefill decodes from then on, alone.
        for who, before, after in ((moved, "prefill", "decode"), (stayed, "decode", "prefill")):
            turned = made.operate("switch", who, after)
            assert f"serving, before it {before}" in turned
            assert list(pool.map(lambda prompt: tokens(ask(made.url, prompt)), PROMPTS * 2)) == wanted * 2
        assert [tokens(answer.result(120)) for answer in answers] == wanted
        made.at_rest()
        assert {child.pid for role in ("prefill", "decode") for child in made.instances(role)} == processes
        victim = made.instances("decode")[0]  # it was started as that
        os.kill(victim.pid, signal.SIGKILL)
        # Who has been switched still hears of the others' end.
        made.logged(re.compile(r"a rank of this replica is lost: .*DP rank \d"), 1, within_s=60)
        assert tokens(ask(made.url, PROMPTS[0])) == wanted[0]
        made.terminate()
        made.forget()


def names(made: Served, role: str) -> list[str]:
    """The names of the instances in `role`, from `segue ps`."""
    return list(dict.fromkeys(re.findall(rf"^(\w+) .* {role} ", made.operate("ps"), re.M)))


def test_a_model_without_experts_is_refused_in_one_sentence(tiny: Path) -> None:
    made = served(tiny, *TWO, wait=False)
    assert made.process.wait(120) == 2
    assert re.search(
        r"^segue: prefill-0\.dp\d: --enable-expert-parallel shares out", made.log(), re.MULTILINE
    )
    made.forget()
