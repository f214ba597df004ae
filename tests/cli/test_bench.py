"""`segue bench` against a server that holds no model: what it asks, what it counts, what it says."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_openai import FakeOpenAI, running

from segue.cli.bench.loadgen import ClientConnection, Event, EventReader, Failure, Target, stream
from segue.cli.commands.bench import Bench
from segue.cli.commands.bench_flags import BenchConfig
from segue.cli.main import main
from segue.kv.errors import ConfigError, SegueError


def measure(fake: FakeOpenAI, **settings: Any) -> dict[str, Any]:
    settings = {"requests": 6, "warmup": 2, "output_tokens": 4, "input_tokens": 20} | settings
    with running(fake) as url:
        return asyncio.run(Bench(BenchConfig(url=url, **settings)).run())


def test_closed_loop_keeps_as_many_in_flight_as_asked() -> None:
    fake = FakeOpenAI()
    report = measure(fake, requests=12, warmup=0, concurrency=3, detailed=True)
    assert (report["completed"], report["error_kinds"], report["total_output_tokens"]) == (12, {}, 48)
    assert fake.most_running <= 3
    assert len(fake.bodies) == 12
    assert [len(gaps) for gaps in report["itls"]] == [3] * 12  # the token with an empty text counts
    assert (report["request_rate"], report["max_concurrency"]) == ("inf", 3)


def test_requests_say_what_a_measurement_needs() -> None:
    fake = FakeOpenAI()
    measure(fake)
    body = fake.bodies[-1]
    assert body["model"] == "tiny"
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert "return_timeline" not in body


def test_the_model_that_was_named_is_asked_for() -> None:
    fake = FakeOpenAI()
    report = measure(fake, model="another")
    assert {body["model"] for body in fake.bodies} == {report["model_id"]} == {"another"}


def test_prompts_are_exact_distinct_and_repeatable() -> None:
    first, second, other = FakeOpenAI(), FakeOpenAI(), FakeOpenAI()
    report = measure(first, shared_prefix_tokens=5, concurrency=1)
    measure(second, shared_prefix_tokens=5, concurrency=1)
    measure(other, shared_prefix_tokens=5, concurrency=1, seed=1)
    prompts = [b["prompt"] for b in first.bodies]
    assert report["exact_prompt_tokens"]
    assert {len(p) for p in prompts} == {20}
    assert len({tuple(p[:5]) for p in prompts}) == 1
    assert len({tuple(p[5:]) for p in prompts}) == len(prompts) == 8  # warm-up prompts differ, too
    assert prompts == [b["prompt"] for b in second.bodies]
    assert prompts != [b["prompt"] for b in other.bodies]


def test_without_tokenize_prompts_are_words_and_the_report_says_so() -> None:
    fake = FakeOpenAI(can_tokenize=False)
    report = measure(fake)
    assert not report["exact_prompt_tokens"]
    assert {len(b["prompt"].split()) for b in fake.bodies} == {20}


def test_chat_api_sends_messages_and_the_role_event_is_no_token() -> None:
    fake = FakeOpenAI()
    report = measure(fake, api="chat", warmup=0, detailed=True)
    assert fake.bodies[0]["messages"][0]["role"] == "user"
    assert [len(gaps) for gaps in report["itls"]] == [3] * 6


def test_open_loop_runs_every_arrival() -> None:
    fake = FakeOpenAI()
    report = measure(fake, rate=500.0, requests=20)
    assert (report["completed"], report["request_rate"], report["max_concurrency"]) == (20, 500.0, None)


def test_requests_that_are_due_wait_for_their_turn() -> None:
    fake = FakeOpenAI()
    report = measure(fake, rate=1e5, requests=20, warmup=0, concurrency=2, detailed=True)
    assert report["completed"] == 20
    assert fake.most_running <= 2
    assert report["max_concurrent_requests"] <= 2
    # The last one was due long before one of the two places was free.
    assert report["queue_times"][-1] > 0.5 * report["duration"]
    assert report["max_client_queue_time_ms"] == pytest.approx(1e3 * max(report["queue_times"]))


def test_segue_splits_the_time_to_the_first_token() -> None:
    fake = FakeOpenAI(owned_by="segue")
    report = measure(fake)
    assert fake.bodies[0]["return_timeline"] is True
    split = report["ttft_split_ms"]
    assert {k: v["median"] for k, v in split.items()} == {"queue": 250.0, "wire": 500.0}


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (429, "http_429"),
        (500, "http_500"),
        ("cut", "cut_off"),
        ("error", "in_stream"),
        ("garbage", "protocol"),
    ],
)
def test_errors_are_counted_by_kind_and_the_rest_goes_on(what: int | str, kind: str) -> None:
    fake = FakeOpenAI()
    fake.fail = {1: what, 3: what}
    result = measure(fake, warmup=0, concurrency=1, detailed=True)
    assert result["error_kinds"] == {kind: 2}
    assert (result["completed"], result["failed"]) == (4, 2)
    assert result["errors"] == ["", kind, "", kind, "", ""]


def test_a_server_that_answers_nothing_right_is_an_error_not_a_table() -> None:
    fake = FakeOpenAI()
    fake.fail = dict.fromkeys(range(2), 500)
    with pytest.raises(SegueError, match="no warm-up request succeeded: http_500"):
        measure(fake)


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http://127.0.0.1:1", "--requests", "1"]) == 1
    assert "connect" in capsys.readouterr().err


def test_a_silent_server_is_a_timeout() -> None:
    async def silent() -> str:
        stop = asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await stop.wait()
            writer.close()

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        result = await stream(ClientConnection(Target("127.0.0.1", port, "", None)), "/", b"{}", 0.05)
        stop.set()
        server.close()
        await server.wait_closed()
        return result.error

    assert asyncio.run(silent()) == "timeout"


def test_an_idle_connection_that_the_server_closed_is_opened_again() -> None:
    served = 0

    async def once() -> tuple[str, str]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal served
            await reader.readuntil(b"\r\n\r\n{}")
            served += 1
            body = b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            writer.close()  # although nothing said so: keep-alive was offered

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        connection = ClientConnection(Target("127.0.0.1", server.sockets[0].getsockname()[1], "", None))
        results = [await stream(connection, "/", b"{}", 60.0) for _ in range(2)]
        server.close()
        await server.wait_closed()
        return results[0].error, results[1].error

    assert asyncio.run(once()) == ("", "")
    assert served == 2


GOOD = b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("answers", "errors", "connections"),
    [
        # What comes after an error belongs to nobody: the next request must not read it.
        ([(b'data: {"error": {}}\n\n', 100), (GOOD, 0)], ["in_stream", ""], 2),
        # It may have been carried out: it is not sent again.
        ([(GOOD, 0), (GOOD[:20], -1)], ["", "disconnected"], 1),
        ([(b"", -1)], ["disconnected"], 1),
        ([(GOOD, 0), (GOOD, 0)], ["", ""], 1),
    ],
    ids=["an error in the stream", "cut off within an answer", "closed without a word", "kept alive"],
)
def test_a_request_is_sent_once_and_what_is_left_of_an_answer_is_read_by_nobody(
    answers: list[tuple[bytes, int]], errors: list[str], connections: int
) -> None:
    """Each answer, and how many bytes are still owed; -1: the connection ends there."""
    opened: list[Any] = []
    asked: list[bytes] = []

    async def main() -> list[str]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(asyncio.current_task())
            try:
                while True:
                    await reader.readuntil(b"\r\n\r\n{}")
                    body, owed = answers[len(asked)]
                    asked.append(body)
                    if body:
                        size = len(body) + abs(owed)
                        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + body)
                    if owed < 0:
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        connection = ClientConnection(Target("127.0.0.1", server.sockets[0].getsockname()[1], "", None))
        found = [(await stream(connection, "/", b"{}", 60.0)).error for _ in answers]
        connection.close()
        server.close()
        await asyncio.gather(*opened)
        await server.wait_closed()
        return found

    assert asyncio.run(main()) == errors
    assert (len(asked), len(opened)) == (len(answers), connections)


@pytest.mark.parametrize("cut", range(1, 12))
def test_events_may_be_cut_anywhere(cut: int) -> None:
    got: list[bytes] = []
    reader = EventReader(got.append)
    data = b"data: one\n\n: comment\nevent: x\ndata:two\r\n\r\ndata: [DONE]\n\n"
    for start in range(0, len(data), cut):
        reader.feed(data[start : start + cut])
    assert got == [b"one", b"two", b"[DONE]"]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.cli.bench.loadgen.MAX_EVENT_BYTES", 100)
    reader = EventReader(lambda data: None)
    with pytest.raises(Failure, match="protocol"):
        reader.feed(b"data: " + b"x" * 200)


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["nonsense"], "http://HOST:PORT"),
        (["ftp://h:1"], "http://HOST:PORT"),
        (["http://h:99999"], "http://HOST:PORT"),
        (["http://h:1", "--requests", "0"], "--requests"),
        (["http://h:1", "--rate", "0"], "--rate"),
        (["http://h:1", "--rate", "1", "--concurrency", "0"], "--concurrency"),
        (["http://h:1", "--dataset", "/nowhere"], "--dataset /nowhere cannot be read"),
        (["http://h:1", "--input-tokens", "5", "--shared-prefix-tokens", "5"], "--shared-prefix-tokens"),
        (["http://h:1", "--api-key-file", "/nowhere"], "--api-key-file"),
    ],
)
def test_wrong_flags_are_one_sentence(
    flags: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    captured = capsys.readouterr()
    assert fragment in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    file = tmp_path / "result.json"
    fake = FakeOpenAI(owned_by="segue")
    with running(fake) as url:
        flags = ["--requests", "3", "--warmup", "1", "--output-tokens", "2", "--slo-ttft-ms", "60000"]
        assert main(["bench", url, *flags, "--json", str(file), "--api-key-file", str(key)]) == 0
    out = capsys.readouterr().out
    assert [
        x
        for x in ("3 of 3 requests of tiny", "time to first token", "goodput", "ttft: wire", "█")
        if x not in out
    ] == []
    report = json.loads(file.read_text())
    assert report["request_goodput"] == report["request_throughput"]
    assert report["config"]["requests"] == 3
    assert report["client"]["cpu_us_per_event"] > 0
    assert "sesame" not in file.read_text() + out
    assert fake.headers[-1]["authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"OPENAI_API_KEY": "theirs"}, "Bearer theirs"),
        ({"OPENAI_API_KEY": "theirs", "SEGUE_API_KEY": "ours"}, "Bearer ours"),
        ({}, None),
    ],
)
def test_a_key_comes_from_the_variables_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], shown: str | None
) -> None:
    for name in ("OPENAI_API_KEY", "SEGUE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "result.json"
    fake = FakeOpenAI()
    with running(fake) as url:
        flags = ["--requests", "1", "--warmup", "0", "--output-tokens", "2"]
        assert main(["bench", url, *flags, "--json", str(file)]) == 0
    assert fake.headers[-1].get("authorization") == shown
    assert not any(value in file.read_text() for value in environ.values())


def test_status_is_1_if_nothing_completed(tmp_path: Path) -> None:
    fake = FakeOpenAI()
    fake.fail = dict.fromkeys(range(3), 503)
    with running(fake) as url:
        assert main(["bench", url, "--requests", "3", "--warmup", "0", "--json", str(tmp_path / "r")]) == 1


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_base_of_the_url(base: str) -> None:
    assert Target.of(f"http://127.0.0.1:8000{base}") == Target("127.0.0.1", 8000, "", None)


def test_config_checks_itself() -> None:
    with pytest.raises(ConfigError, match="--output-tokens"):
        BenchConfig(url="http://h:1", output_tokens=0)


@pytest.mark.parametrize(
    ("choices", "carries"),
    [
        ([{"text": "x"}], True),
        ([{"text": ""}], True),
        ([{"text": "", "finish_reason": "stop"}], False),
        ([{"text": "x", "finish_reason": "stop"}], True),
        ([{"text": "", "token_ids": []}], False),
        ([{"text": "", "token_ids": [7], "finish_reason": "stop"}], True),
        ([{"delta": {"role": "assistant", "content": ""}}], False),
        ([{"delta": {"content": "x"}}], True),
        ([{"text": "", "finish_reason": "stop"}, {"text": "x"}], True),
        ([], False),
    ],
)
def test_an_event_carries_tokens_if_it_brought_output(choices: list[dict[str, Any]], carries: bool) -> None:
    assert msgspec.convert({"choices": choices}, Event).carries_tokens() is carries


def test_a_stream_that_ends_well_without_a_token_is_an_error() -> None:
    async def main() -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n{}")
            body = b"data: [DONE]\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            connection = ClientConnection(Target(*server.sockets[0].getsockname(), "", None))
            return (await stream(connection, "/", b"{}", 60.0)).error

    assert asyncio.run(main()) == "no_tokens"
