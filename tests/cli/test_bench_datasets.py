"""`segue bench --dataset`: ShareGPT files and Mooncake traces, and what is wrong with others."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeOpenAI, running

from segue.cli.bench.workloads import Conversation, TraceLine, read_dataset
from segue.cli.commands.bench import Bench
from segue.cli.commands.bench_flags import BenchConfig
from segue.kv.errors import ConfigError


def measure(fake: FakeOpenAI, dataset: Path, **settings: Any) -> dict[str, Any]:
    with running(fake) as url:
        config = BenchConfig(url=url, dataset=str(dataset), warmup=0, **settings)
        return asyncio.run(Bench(config).run())


def conversation(*turns: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


@pytest.fixture
def share_gpt(tmp_path: Path) -> Path:
    file = tmp_path / "share.json"
    talks = [conversation("one", "a b c", "more"), conversation("alone"), conversation("two", "a b")]
    file.write_text(json.dumps([*talks, conversation(" ", "a"), conversation("three", "")], indent=1))
    return file


def test_share_gpt_asks_the_first_question_of_each_conversation_once(share_gpt: Path) -> None:
    fake = FakeOpenAI()
    report = measure(fake, share_gpt, concurrency=1)
    # The answer's length is that of the recorded one, at least a token.
    assert {body["prompt"]: body["max_tokens"] for body in fake.bodies} == {"one": 3, "two": 2, "three": 1}
    assert (report["num_prompts"], report["max_concurrency"]) == (3, 1)


@pytest.mark.slow
def test_share_gpt_is_drawn_by_the_seed(share_gpt: Path) -> None:
    def order(seed: int) -> list[str]:
        fake = FakeOpenAI(can_tokenize=False)
        measure(fake, share_gpt, concurrency=1, requests=2, seed=seed, output_tokens=1, api="chat")
        return [body["messages"][0]["content"] for body in fake.bodies]

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1
    assert all(len(set(order(seed))) == 2 for seed in range(8))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 5000, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]},
        {"timestamp": 5000, "input_length": 600, "output_length": 3, "hash_ids": [0]},
        {"timestamp": 5010, "input_length": 1300, "output_length": 1, "hash_ids": [0, 1, 7]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return file


def test_equal_hash_ids_are_equal_blocks_of_a_prompt(trace: Path) -> None:
    fake = FakeOpenAI()
    report = measure(fake, trace, detailed=True, requests=64)
    first, second, third = sorted(
        (body["prompt"] for body in fake.bodies), key=lambda p: (len(p) != 1100, len(p))
    )
    assert (len(first), len(second), len(third)) == (1100, 600, 1300)
    assert first[:512] == second[:512] == third[:512]
    assert first[512:1024] == third[512:1024] != first[:512]
    assert second[512:600] != first[512:600]
    assert first[1024:] != third[1024:1100]
    assert sorted(report["output_lens"]) == [1, 2, 3]
    assert (report["request_rate"], report["max_concurrency"], report["exact_prompt_tokens"]) == (
        "inf",
        None,
        True,
    )


def test_a_trace_is_sent_at_its_times_or_at_a_rate(trace: Path) -> None:
    def due(**settings: Any) -> list[float | None]:
        bench = Bench(BenchConfig(url="http://h:1", dataset=str(trace), **settings))
        return bench.arrivals()

    assert due() == [0.0, 0.0, 0.01]
    assert due(concurrency=1, requests=2) == [0.0, 0.0]
    at_a_rate = due(rate=0.001)
    assert at_a_rate[0] is not None
    assert at_a_rate[0] > 0.01


def test_the_two_kinds_are_told_apart(share_gpt: Path, trace: Path) -> None:
    assert read_dataset(str(share_gpt))[0] == Conversation("one", "a b c")
    assert read_dataset(str(trace))[1] == TraceLine(5000, 600, 3, [0])


GOOD = '{"timestamp": 1, "input_length": 10, "output_length": 2, "hash_ids": [0]}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("[]", "has no ShareGPT conversation of two turns"),
        ('[\n{"conversations": []},\n{"id": 3}]', "line 3: not a ShareGPT conversation: .*`conversations`"),
        ('[\n{"conversations": [{"value": 1}]}]', "line 2: not a ShareGPT conversation"),
        ('[{"conversations": []}\n\n{}]', "line 3: not JSON: a comma or ] is missing"),
        ('[{"conversations": []},\n{"conversations": ', "line 2: not JSON"),
        ("[" * 100_000, "line 1: not"),
        (GOOD + "{}", "line 2: not a line of a Mooncake trace: .*`timestamp`"),
        (GOOD + "\n" + GOOD.replace("10", "0"), "line 3: .*input_length must be between 1 and"),
        (GOOD.replace(" 2,", " -2,"), "line 1: .*output_length must be between 1 and"),
        (GOOD.replace("[0]", "[0, 1]"), "line 1: .*2 hash_ids are more than the 1 blocks of 512 tokens"),
        (GOOD.replace(" 1,", " 2,") + GOOD, "line 2: its timestamp is before that of the line above"),
        (GOOD.replace(" 1,", " 1e300,"), "line 1: .*timestamp must be between"),
        ("id,prompt\n1,hello\n", "line 1: not a line of a Mooncake trace"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_dataset(str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"[\xff")
    with pytest.raises(ConfigError, match="byte 1: not UTF-8"):
        read_dataset(str(file))
