"""Deployments on processors weaker than this one: the first command of the README starts there, too."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served import Served, command
from test_serve import SHORT, assert_right, completion, generated, token_ids

from emulated import below
from ports import HeldPort

pytestmark = [pytest.mark.timeout(300)]

SMALL = ("--kv-gib", "0.05", "--threads-per-worker", "1", "--port", "0", "--served-model-name", "smollm2")


def soak(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


def needs_more_than(ceiling: str) -> None:
    if not below(ceiling):
        pytest.skip("this processor has nothing above that: it is what the other tests serve with")


# `test_engine_emulated.py` has the kernels and types of each ceiling, without a deployment.
@pytest.mark.slow
@pytest.mark.parametrize("ceiling", ["avx2", soak("sse"), soak("avx512")])
def test_a_deployment_without_dtype_takes_float32_where_bfloat16_is_not_multiplied(
    ceiling: str, tiny: Path
) -> None:
    needs_more_than(ceiling)
    asked = [[token % 256 for token in prompt] for prompt in SHORT]
    served = Served("--model", str(tiny), *SMALL, environ=below(ceiling))
    assert "event=dtype dtype=float32 setting=auto reason='this processor does not" in served.log()
    assert "is slow here" not in served.log()
    assert_right(served, asked, generated(asked, tiny))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ceiling", "dtype"),
    [
        ("avx2", "float16"),
        soak("sse", "bfloat16"),
        soak("avx512", "bfloat16"),
    ],
)
def test_a_type_that_is_named_is_served_with_one_warning(ceiling: str, dtype: str, tiny: Path) -> None:
    needs_more_than(ceiling)
    asked = [[token % 256 for token in prompt] for prompt in SHORT]
    served = Served("--model", str(tiny), *SMALL, "--dtype", dtype, environ=below(ceiling))
    assert served.log().count("is slow here") == 1
    # Rounding may choose another token here and there: that all are answered, and the same again, is enough.
    with served:
        answers = [[token_ids(completion(served.url, p, 8)) for p in asked[:4]] for _ in range(2)]
        assert answers[0] == answers[1]
        assert all(len(tokens) == 8 for tokens in answers[0])
        assert served.stop() == 0


@pytest.mark.slow
def test_instances_whose_processors_choose_different_types_are_no_pair_and_all_say_which_flag_to_give(
    tiny: Path,
) -> None:
    """Decode is given the type that a processor with bfloat16 would choose."""
    mend = "prefill serves this model in float32, decode in bfloat16; start both with --dtype float32"
    model = ("--model", str(tiny), *SMALL[:4])
    held = HeldPort()
    registry = f"http://127.0.0.1:{held.port}"
    with Served(
        "--bootstrap-port", str(held.port), *model, command="prefill", environ=below("avx2")
    ) as prefill:
        assert "event=dtype dtype=float32 setting=auto" in prefill.log()
        with Served("--registry", registry, *model, "--dtype", "bfloat16", command="decode") as decode:
            decode.logged(re.compile(f"cannot join .*{re.escape(mend)}"))
            prefill.logged(re.compile(f"no session with .*{re.escape(mend)}"))
            front = ("--registry", registry, "--model", str(tiny), "--port", "0")
            with Served(*front, command="frontend", wait=False) as frontend:
                [line] = frontend.logged(re.compile("event=listening url="))
                url = line.rpartition("url=")[2]
                frontend.logged(re.compile("session with decode"))
                frontend.logged(re.compile("session with prefill"))
                body = {"model": tiny.name, "prompt": [5, 6, 7], "max_tokens": 3}
                until = time.monotonic() + 60
                while (
                    mend not in (ready := httpx.get(f"{url}/ready")).text
                ):  # until both have said their load
                    assert time.monotonic() < until, ready.text
                    time.sleep(0.05)
                asked = httpx.post(f"{url}/v1/completions", json=body)
                assert (ready.status_code, asked.status_code) == (503, 503)
                assert mend in asked.text
                done = command("doctor", "--registry", registry, "--json")
                assert done.returncode == 1
                assert "start both with --dtype float32" in done.stdout
                assert frontend.stop(at_rest=False) == 0
            assert decode.stop(at_rest=False) == 0
        assert prefill.stop(at_rest=False) == 0
