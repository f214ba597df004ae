"""The whole thing as a user runs it: `segue serve` with SmolLM2, asked over HTTP."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from served import Served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FLOAT32 = ("--dtype", "float32", "--port", "0", "--kv-gib", "0.4", "--threads-per-worker", "1")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*FLOAT32) as made:
        yield made


def completion(url: str, prompt: list[int], count: int, **options: object) -> dict[str, object]:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def token_ids(answer: dict[str, object]) -> list[int]:
    return answer["choices"][0]["token_ids"]  # type: ignore[index]


def drawn(*lengths: int) -> list[list[int]]:
    """Random prompts of these lengths, always the same ones."""
    rng = random.Random(11)
    return [[rng.randrange(100, 40000) for _ in range(n)] for n in lengths]


#: Sixteen around the ends of pages and chunks, and none long.
SHORT = drawn(1, 2, 15, 16, 17, 18, 31, 32, 33, 48, 63, 64, 65, 100, 129, 200)


def generated(asked: list[list[int]], folder: Path | None = None) -> list[list[int]]:
    """The tokens that transformers generates for these prompts, with SmolLM2 or `folder`: greedy, float32, 8
    each."""
    import torch
    from transformers import AutoModelForCausalLM

    from segue.engine.models.model_store import resolve_model

    torch.set_num_threads(1)
    folder = folder or resolve_model("smollm2", progress=lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def short_reference() -> list[list[int]]:
    """The right answers to `SHORT`."""
    return generated(SHORT)


def test_paris(served: Served) -> None:
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_command_that_serve_prints_shows_the_fleet(served: Served) -> None:
    (line,) = re.findall(r"^look: (.*)$", served.log(), re.M)
    assert line.endswith(" ps")
    shown = served.operate("ps")
    assert [row.split()[2] for row in shown.splitlines()[1:3]] == ["decode", "prefill"]


def test_paris_through_the_openai_client(served: Served) -> None:
    text, usage = "", None
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
    assert "Paris" in text
    assert usage is not None
    assert usage.completion_tokens > 0
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("language", ["", "python"])
def test_paris_as_the_readme_asks(served: Served, language: str) -> None:
    """With curl, and with a program of its own."""
    text = (ROOT / "README.md").read_text().partition("## Ask")[2]
    block = text.partition(f"```{language}\n")[2].partition("```")[0]
    assert "http://127.0.0.1:8000" in block
    run = [sys.executable, "-c"] if language else ["bash", "-c"]
    command = [*run, block.replace("http://127.0.0.1:8000", served.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def assert_sixteen_at_once(url: str, asked: list[list[int]], reference: list[list[int]]) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: completion(url, p, 8), asked))
    assert [token_ids(a) for a in answers] == reference
    again = [token_ids(completion(url, p, 8)) for p in asked[:8]]
    assert again == reference[:8], "a prefix hit changed the tokens"


def test_tokens_equal_generate_with_sixteen_at_once(served: Served, short_reference: list[list[int]]) -> None:
    assert_sixteen_at_once(served.url, SHORT, short_reference)


TWO_AND_TWO = ("--prefill", "2", "--decode", "2")


def assert_right(made: Served, asked: list[list[int]], expected: list[list[int]]) -> None:
    with made, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: completion(made.url, p, 8), asked))
        assert [token_ids(a) for a in answers] == expected
        assert made.stop() == 0


# With SmolLM2 in test_smollm2_tokens.py.
@pytest.mark.slow
def test_two_and_two(tiny: Path) -> None:
    asked = [[token % 256 for token in prompt] for prompt in SHORT]
    small = ("--model", str(tiny), "--served-model-name", "smollm2", "--kv-gib", "0.01")
    how = ("--transport", "tcp", "--chunk-tokens", "64", "--send-layers", "1")
    made = Served(*FLOAT32, *small, *TWO_AND_TWO, *how)
    assert_right(made, asked, generated(asked, tiny))


@pytest.mark.slow
def test_json_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "known": {"type": "boolean"}},
        "required": ["city", "known"],
        "additionalProperties": False,
    }
    body = {
        "model": "smollm2",
        "messages": QUESTION,
        "max_tokens": 60,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    }
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    made = json.loads(answer["choices"][0]["message"]["content"])
    assert set(made) == {"city", "known"}
    assert isinstance(made["known"], bool)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"max_tokens": 0}, 400),
        ({"max_tokens": 10**9}, 400),
        ({"n": 0}, 400),
        ({"top_logprobs": 1000, "logprobs": True}, 400),
        ({"messages": "not a list"}, 400),
        ({"messages": []}, 400),
        ({"model": "nobody"}, 404),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400),
        ({"temperature": "hot"}, 400),
        ({"unknown_field": {"a": 1}}, 200),
    ],
)
def test_bad_input_is_one_typed_error(served: Served, change: dict[str, object], status: int) -> None:
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 2, **change}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    assert httpx.get(f"{served.url}/ready", timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\xff\xfe{", 400),
        (b"{", 400),
        (b"[" * 10_000, 400),
        (b"[" * 100_000, 400),
        (b'{"a": "' + b"x" * 10**7 + b'"}', 413),
    ],
)
def test_bytes_that_are_no_request(served: Served, content: bytes, status: int) -> None:
    answer = httpx.post(f"{served.url}/v1/chat/completions", content=content, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200


def test_a_client_that_leaves_frees_both_sides(served: Served) -> None:
    body = {
        "model": "smollm2",
        "prompt": [500] * 40,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()  # kept: dropping it closes the connection
        next(lines)
    # With the long generation gone, the next answer comes at once and alone.
    assert len(token_ids(completion(served.url, [1, 2, 3], 3))) == 3
    metrics = httpx.get(f"{served.url}/metrics", timeout=60).text
    assert "segue_aborts" in metrics


@pytest.mark.slow
def test_ctrl_c_drains_and_leaves_nothing(served: Served) -> None:
    """Runs last in this module: it ends the deployment."""
    with httpx.stream(
        "POST",
        f"{served.url}/v1/completions",
        json={"model": "smollm2", "prompt": [500] * 9, "max_tokens": 40, "ignore_eos": True, "stream": True},
        timeout=60,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        # Not at rest: a drain is of use to who still streams. What is left of the stream waits in its socket.
        assert served.stop(at_rest=False) == 0
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]", "the drain cut a stream"
