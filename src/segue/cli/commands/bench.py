"""`segue bench`: send an OpenAI server synthetic or recorded prompts and report its latencies."""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime

import msgspec
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from segue import __version__
from segue.cli.bench.loadgen import ClientConnection, Failure, Target, fetch_json, stream
from segue.cli.bench.plot import LABELS, histogram, need_matplotlib, write_png
from segue.cli.bench.stats import RequestTimes, detailed, latencies, summary
from segue.cli.bench.workloads import (
    WORDS,
    Conversation,
    Dataset,
    Prompt,
    Synthetic,
    TraceLine,
    Vocabulary,
    read_dataset,
)
from segue.cli.commands.bench_flags import MAX_CONNECTIONS, BenchConfig, config_of
from segue.cli.commands.client_flags import authorization, trusting
from segue.cli.terminal import print_json, progress, terminal, write_json
from segue.kv import SegueError
from segue.kv.session import awaited

PARTS = ("queue", "bootstrap", "reserve", "prefill", "wire", "commit")

BAR_WIDTH = 40
DEFAULT_IN_FLIGHT = 4

Tick = Callable[[], None]


class Bench:
    """One measurement against one server."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.target = Target.of(config.url, lambda: trusting(config.https_cert))
        self.headers = authorization(config.api_key_file)
        self.path = "/v1/completions" if config.api == "completions" else "/v1/chat/completions"
        self.model = config.model or ""
        self.is_segue = False
        self.vocabulary = Vocabulary()
        self.samples: list[RequestTimes] = []
        self._synthetic = Synthetic(config.input_tokens, config.shared_prefix_tokens, config.seed)
        self._entries: Dataset = _chosen(config)
        self._output_tokens: list[int] = []
        self._idle: list[ClientConnection] = []

    @property
    def requests(self) -> int:
        """The measured requests: as many as asked for, if the dataset has them."""
        return len(self._entries) or self.config.requests

    async def prepare(self) -> None:
        """Ask the server for its model and, if it can, for token ids. Raises a SegueError if the
        server does not answer."""
        connection = ClientConnection(self.target, self.headers)
        self._idle.append(connection)
        try:
            listed = await fetch_json(connection, "GET", "/v1/models", None, 30.0)
            models = _Models.of(listed)
        except Failure as exc:
            raise SegueError(f"{self.config.url}/v1/models cannot be read: {exc}") from exc
        if not self.model:
            if not models:
                raise SegueError(f"{self.config.url} lists no model; name one with --model")
            self.model = models[0].id
        self.is_segue = any(m.owned_by == "segue" for m in models)
        self.vocabulary = await self._vocabulary(connection)
        self._output_tokens = [await self._length(entry, connection) for entry in self._entries]

    async def _vocabulary(self, connection: ClientConnection) -> Vocabulary:
        try:
            tokens = await self._tokenize(" ".join(WORDS), connection)
        except Failure:
            return Vocabulary()
        if self.config.api == "chat" or not tokens:
            return Vocabulary(WORDS, len(WORDS) / max(1, len(tokens)))
        return Vocabulary(sorted(set(tokens)))

    async def _length(self, entry: Conversation | TraceLine, connection: ClientConnection) -> int:
        """Tokens to generate for `entry`: as many as the flag says, or as it had when it was recorded."""
        if self.config.output_tokens is not None:
            return self.config.output_tokens
        if isinstance(entry, TraceLine):
            return entry.output_length
        try:
            return max(1, len(await self._tokenize(entry.answer, connection)))
        except Failure:
            return self.vocabulary.tokens(entry.answer)

    async def _tokenize(self, text: str, connection: ClientConnection) -> list[int]:
        ask = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = await fetch_json(connection, "POST", "/tokenize", ask, 30.0)
        try:
            return msgspec.convert(answer, _Tokens).tokens
        except msgspec.ValidationError as exc:
            raise Failure("protocol") from exc

    def body(self, index: int) -> bytes:
        """The request of `index` as JSON; warm-up requests count from -1 down."""
        config = self.config
        recorded = index >= 0 and bool(self._entries)
        payload: dict[str, object] = {
            "model": self.model,
            "max_tokens": self._output_tokens[index] if recorded else config.output_tokens or 64,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_segue:
            payload["return_timeline"] = True
        prompt = self._prompt(index) if recorded else self._synthetic.prompt(index, self.vocabulary)
        if config.api == "completions":
            payload["prompt"] = prompt
        else:
            payload["messages"] = [{"role": "user", "content": prompt}]
        return msgspec.json.encode(payload)

    def _prompt(self, index: int) -> Prompt:
        entry = self._entries[index]
        if isinstance(entry, Conversation):
            return entry.question
        return entry.prompt(index, self.vocabulary, self.config.seed)

    def arrivals(self) -> list[float | None]:
        """When each measured request is due, in seconds since the beginning; None: when another has ended."""
        rate, first = self.config.rate, self._entries[0] if self._entries else None
        if rate is not None:
            draw, due = random.Random(f"{self.config.seed}/arrivals"), 0.0
            return [due := due + draw.expovariate(rate) for _ in range(self.requests)]
        if isinstance(first, TraceLine):
            begin = first.timestamp
            lines = [entry for entry in self._entries if isinstance(entry, TraceLine)]
            return [(line.timestamp - begin) / 1e3 for line in lines]
        return [None] * self.requests

    async def load(self, requests: Iterable[tuple[int, float | None]], limit: int, tick: Tick) -> None:
        """Send each request (its index and due time) when it is due and fewer than `limit` are in flight, and
        add its times to `samples`."""
        slots, tasks = asyncio.Semaphore(limit), set[asyncio.Task[None]]()
        begin = time.perf_counter()

        async def one(index: int, queued_s: float) -> None:
            try:
                connection = self._idle.pop() if self._idle else ClientConnection(self.target, self.headers)
                sent = time.perf_counter()
                result = await stream(connection, self.path, self.body(index), self.config.timeout_s)
                self._idle.append(connection)
            finally:
                slots.release()
            sample = RequestTimes(
                [at - sent for at in result.token_times],
                result.end - sent,
                error=result.error,
                start_s=sent - begin,
                queue_s=queued_s,
            )
            sample.tokens = result.usage.completion_tokens if result.usage else len(result.token_times)
            sample.prompt_tokens = result.usage.prompt_tokens if result.usage else 0
            sample.timeline = {k: v for k, v in (result.timeline or {}).items() if k in PARTS}
            self.samples.append(sample)
            tick()

        for index, due in requests:
            if due is not None:
                await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
            await slots.acquire()
            queued_s = 0.0 if due is None else max(0.0, time.perf_counter() - begin - due)
            task = awaited(one(index, queued_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def run(self, tick: Tick = lambda: None) -> dict[str, object]:
        """Warm up, measure, sum up. `tick` is called after each request, warm-up included."""
        try:
            return await self._run(tick)
        finally:
            for connection in self._idle:
                connection.close()

    async def _run(self, tick: Tick) -> dict[str, object]:
        config = self.config
        await self.prepare()
        arrivals = self.arrivals()
        in_flight = config.concurrency
        if in_flight is None and arrivals[0] is None:
            in_flight = DEFAULT_IN_FLIGHT
        warmup = ((-1 - n, None) for n in range(config.warmup))
        await self.load(warmup, in_flight or DEFAULT_IN_FLIGHT, tick)
        warm, self.samples = self.samples, []
        if warm and all(s.error for s in warm):
            raise SegueError(f"no warm-up request succeeded: {warm[0].error}")
        gc.collect()
        gc.freeze()
        date = datetime.now()
        cpu, start = time.process_time(), time.perf_counter()
        await self.load(enumerate(arrivals), in_flight or MAX_CONNECTIONS, tick)
        duration, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.samples.sort(key=lambda sample: sample.start_s)
        events = sum(len(s.token_s) for s in self.samples)
        backend = "openai" if config.api == "completions" else "openai-chat"
        report: dict[str, object] = {
            "date": date.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": backend,
            "backend": backend,
            "label": None,
            "model_id": self.model,
            "tokenizer_id": None,
            "num_prompts": len(self.samples),
            "request_rate": "inf" if config.rate is None else config.rate,
            "burstiness": 1.0,
            "max_concurrency": in_flight,
            **summary(self.samples, duration, config.slo_ttft_ms, config.slo_itl_ms),
            "version": __version__,
            "command": shlex.join(["segue", *sys.argv[1:]]),
            "config": asdict(config),
            "exact_prompt_tokens": self.vocabulary.exact,
            "client": {
                "cpu_s": cpu,
                "cpu_share": cpu / duration,
                "cpu_us_per_event": 1e6 * cpu / events if events else 0.0,
            },
        }
        return report | (detailed(self.samples) if config.detailed else {})


def _chosen(config: BenchConfig) -> Dataset:
    """The entries that are sent: the first lines of a trace, conversations drawn by the seed."""
    if config.dataset is None:
        return []
    found = read_dataset(config.dataset)
    if isinstance(found[0], Conversation):
        random.Random(f"{config.seed}/dataset").shuffle(found)
    return found[: config.requests]


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model] = []

    @classmethod
    def of(cls, answer: object) -> list[_Model]:
        try:
            return msgspec.convert(answer, cls).data
        except msgspec.ValidationError as exc:
            raise Failure("protocol") from exc


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int] = []


def bench(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON and a picture; 1 if no request completed."""
    config = config_of(args)
    if args.plot:
        need_matplotlib()
    measurement = Bench(config)
    with progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("requests", total=config.warmup + measurement.requests)
        report = uvloop.run(measurement.run(lambda: bar.advance(task)))
    if args.json == "-":
        print_json(report)
    else:
        terminal().print(*tables(report), *bars(measurement.samples), sep="\n")
        if args.json:
            write_json(args.json, report)
    if args.plot:
        write_png(args.plot, measurement.samples, f"{measurement.model} at {config.url}")
    return 0 if report["completed"] else 1


def tables(report: dict[str, object]) -> list[Table | str]:
    """The report for people."""
    client, kinds, split = report["client"], report["error_kinds"], report.get("ttft_split_ms", {})
    assert isinstance(client, dict)
    assert isinstance(kinds, dict)
    assert isinstance(split, dict)
    errors = ", ".join(f"{kind} {count}" for kind, count in kinds.items()) or "none"
    head = (
        f"{report['completed']} of {report['num_prompts']} requests of {report['model_id']} "
        f"in {report['duration']:.2f} s; errors: {errors}\n"
        f"{report['request_throughput']:.2f} requests/s, {report['output_throughput']:.1f} output tokens/s"
    )
    if report["request_goodput"] is not None:
        head += f", goodput {report['request_goodput']:.2f} requests/s"
    shown = ("mean", "median", "p90", "p99", "max")
    table = Table("milliseconds", *shown)
    waited = (
        {} if report["max_client_queue_time_ms"] in (None, 0.0) else {"client_queue_time": "due, not sent"}
    )
    for key, label in (waited | LABELS).items():
        _row(table, label, [report[f"{word}_{key}_ms"] for word in shown])
    for name, values in split.items():
        _row(table, f"  ttft: {name}", [values[word] for word in shown])
    foot = (
        f"the client used {client['cpu_share']:.0%} of a core, {client['cpu_us_per_event']:.0f} µs per event"
        + ("" if report["exact_prompt_tokens"] else "; prompt lengths are approximate")
    )
    return [head, table, foot]


def _row(table: Table, label: str, values: list[object]) -> None:
    if None not in values:
        table.add_row(label, *(f"{value:.2f}" for value in values))


def bars(samples: list[RequestTimes]) -> list[str]:
    """A line for each latency: how its values are distributed from 0 to the largest."""
    found = latencies(samples)
    return [
        f"{label:20} 0 {histogram(found[key], BAR_WIDTH)} {1e3 * max(found[key]):.1f} ms"
        for key, label in LABELS.items()
        if found[key]
    ]
