"""`segue serve` with instances of several ranks, as a user runs and loses them."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx2 as httpx
import pytest
from served import Served

pytestmark = [pytest.mark.timeout(300)]

PROMPTS = [list(range(1, 2 + n)) for n in (0, 20, 90)]
COUNT = 8
SMALL = ("--dtype", "float32", "--port", "0", "--kv-gib", "0.05")
#: What ends by itself stays away; `chaos/test_serve_restarts.py` has the rest.
NEVER = ("--restart", "never")
TWO_ONE = (*SMALL, "--prefill-tp", "2", "--decode-tp", "1")


def reference(folder: Path) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    how = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None}
    made = [model.generate(one, attention_mask=torch.ones_like(one), **how) for one in ids]
    return [one[0, len(prompt) :].tolist() for one, prompt in zip(made, PROMPTS, strict=True)]


def ask(url: str, prompt: list[int], count: int = COUNT) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120)


@pytest.mark.slow
def test_a_deployment_of_two_ranks_and_one_answers_as_the_reference_does(tiny: Path) -> None:
    with Served("--model", str(tiny), "--served-model-name", "tiny", *TWO_ONE, *NEVER) as made:
        answers = [ask(made.url, prompt).json()["choices"][0]["token_ids"] for prompt in PROMPTS]
        assert answers == reference(tiny)
        about = {n: httpx.get(f"{url}/server_info", timeout=60).json() for n, url in made.doors(2).items()}
        assert {name: info["tp_size"] for name, info in about.items()} == {"prefill-0": 2, "decode-0": 1}
        made.at_rest()
        # One rank dies: its instance reports itself gone, and with the only prefill the service ends.
        [rank] = made.instances("segue.server.instance.rank_process")
        os.kill(rank.pid, signal.SIGKILL)
        assert made.process.wait(60) == 1
        assert made.logged(re.compile(r"a rank of this replica is lost"))
        assert made.logged(re.compile(r"event=died child=prefill-0 how='exit status 1'"))
        made.forget()


@pytest.mark.slow
def test_data_parallel_ranks_of_two_ranks_each_answer_as_the_reference_does(tiny: Path) -> None:
    """Not asked what they hold at rest: `holdings` knows deployments of one leader for each instance. Every
    line of every process is JSON."""
    log = ("--log-format", "json", "--log-level", "debug")
    arguments = ("--model", str(tiny), "--served-model-name", "tiny", *TWO_ONE, "--prefill-dp", "2", *log)
    made = Served(*arguments, wait=False)
    try:
        assert made.process.stdout is not None
        url = made.process.stdout.readline().strip().removeprefix("ready ")
        answers = [ask(url, prompt).json()["choices"][0]["token_ids"] for prompt in PROMPTS * 2]
        assert answers == reference(tiny) * 2
        made.process.terminate()
        assert made.process.wait(60) == 0
        assert "killed a rank" not in made.log()
        lines = [json.loads(line) for line in made.log().splitlines()]
        assert all(line["ts"] and line["level"] and line["message"] for line in lines)
        parts = {(line["part"], line.get("rank", 0)) for line in lines}
        leaders = {"prefill-0.dp0", "prefill-0.dp1"}
        assert parts == {
            *((name, rank) for name in leaders for rank in (0, 1)),
            *((name, 0) for name in ("serve", "frontend", "decode-0")),
        }
        [asked] = [line["request_id"] for line in lines if line["message"].startswith("event=answered")][:1]
        same = {line["part"] for line in lines if line.get("request_id") == f"{asked}-0"}
        assert "decode-0" in same
        assert same & leaders
    finally:
        made.kill()


@pytest.mark.soak
def test_context_parallel_prefill_and_pipeline_stages_of_decode_answer_as_the_reference_does(
    tiny: Path,
) -> None:
    sizes = ("--prefill-cp", "2", "--prefill-pp", "2", "--decode-pp", "2", "--transport", "tcp")
    with Served("--model", str(tiny), "--served-model-name", "tiny", *SMALL, *sizes) as made:
        assert [ask(made.url, p).json()["choices"][0]["token_ids"] for p in PROMPTS] == reference(tiny)
        assert len(made.instances("segue.server.instance.rank_process")) == 3 + 1
        assert made.stop() == 0


@pytest.mark.slow
def test_ranks_die_with_a_leader_that_is_killed(tiny: Path) -> None:
    """Also one that stands still; the fixtures of each test look for processes that are left behind."""
    with Served("--model", str(tiny), "--served-model-name", "tiny", *TWO_ONE, *NEVER) as made:
        [rank] = made.instances("segue.server.instance.rank_process")
        rank.suspend()
        [leader] = made.instances("prefill")
        leader.kill()
        assert made.process.wait(60) == 1
        made.forget()


@pytest.mark.slow
def test_instances_of_several_ranks_take_other_roles_and_answer_as_the_reference_does(tiny: Path) -> None:
    """No process ends by it, and the death of a rank is seen in the new role, too."""
    sizes = ("--decode", "2", "--prefill-tp", "2", "--decode-tp", "2", *NEVER)
    with Served("--model", str(tiny), "--served-model-name", "tiny", *SMALL, *sizes) as made:

        def check() -> None:
            answers = [ask(made.url, prompt).json()["choices"][0]["token_ids"] for prompt in PROMPTS]
            assert answers == reference(tiny)

        check()
        ranks = {rank.pid for rank in made.instances("segue.server.instance.rank_process")}
        assert len(ranks) == 3
        [first] = names(made, "prefill")
        turned = made.operate("switch", names(made, "decode")[0], "prefill")
        assert "serving, before it decode" in turned
        assert "serving, before it prefill" in made.operate("switch", first, "decode")
        assert (len(names(made, "prefill")), len(names(made, "decode"))) == (1, 2)
        for _ in range(2):  # each decode instance has its turn
            check()
        made.at_rest()
        assert {rank.pid for rank in made.instances("segue.server.instance.rank_process")} == ranks
        [leader] = made.instances("prefill")  # it was started as that
        [lost] = leader.children()
        os.kill(lost.pid, signal.SIGKILL)
        assert made.logged(re.compile(r"as-decode +\| .*a rank of this replica is lost"), within_s=60)
        assert made.logged(re.compile(r"event=died child=prefill-0-as-decode"), within_s=60)
        check()  # by the other one
        assert made.stop() == 0


def names(made: Served, role: str) -> list[str]:
    """The names of the instances in `role`, from `segue ps`."""
    return re.findall(rf"^(\w+) .* {role} ", made.operate("ps"), re.M)
