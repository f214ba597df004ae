"""`segue bench`: drive an OpenAI server with distinct synthetic prompts and say how it felt."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from segue import __version__
from segue.cli.commands.bench_flags import MAX_CONNECTIONS, BenchConfig, config_of
from segue.cli.terminal import progress, terminal
from segue.kv import ConfigError, SegueError
from segue.kv.session import awaited
from segue.lab.bench.loadgen import ClientConnection, Failure, Target, fetch_json, stream
from segue.lab.bench.stats import RequestTimes, summary
from segue.server.frontend.keys import read_keys
from segue.server.settings.shared_config import AccessConfig

#: Common words, most of which are one token in any vocabulary.
_WORDS = """
the of and to in is was he for it with as his on be at by had not are but from or have an they which
one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any
like my now over such our man me even most made after also did many off before must well back
through years where much your way down should because long each just state those people too little
world still own see work men here life both get between under never day same another know while last
might us great old year come since go against came right used take three small house place again
water found always part night head given however school every fact
"""
WORDS = _WORDS.split()
PARTS = ("queue", "bootstrap", "reserve", "prefill", "wire", "commit")

Tick = Callable[[], None]


class Prompts:
    """Prompts by index: the same index, configuration and seed give the same prompt; two indices
    share only `shared_prefix_tokens`. Token ids where the server can tokenize, words elsewhere."""

    def __init__(self, config: BenchConfig, units: list[int] | list[str], per_token: float) -> None:
        self._config = config
        self._units = units
        self._per_token = per_token
        shared = random.Random(f"{config.seed}/shared")
        self._prefix = [shared.choice(units) for _ in range(self._count(config.shared_prefix_tokens))]

    @property
    def exact(self) -> bool:
        """Prompts have exactly as many tokens as asked for."""
        return isinstance(self._units[0], int)

    def _count(self, tokens: int) -> int:
        return round(tokens * self._per_token)

    def make(self, index: int) -> list[int] | str:
        """The prompt of request `index`; warm-up requests count from -1 down."""
        own = random.Random(f"{self._config.seed}/{index}")
        count = max(1, self._count(self._config.input_tokens) - len(self._prefix))
        units = [*self._prefix, *(own.choice(self._units) for _ in range(count))]
        return [u for u in units if isinstance(u, int)] if self.exact else " ".join(map(str, units))


class Bench:
    """One measurement against one server."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.target = Target.of(config.url)
        self.headers = _authorization(config.api_key_file)
        self.path = "/v1/completions" if config.api == "completions" else "/v1/chat/completions"
        self.model = config.model or ""
        self.is_segue = False
        self.prompts = Prompts(config, list(WORDS), 1.0)
        self._idle: list[ClientConnection] = []

    async def prepare(self) -> None:
        """Ask the server for its model and, if it can, for token ids. Raises a SegueError if the
        server does not answer."""
        connection = ClientConnection(self.target, self.headers)
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
        self.prompts = await self._make_prompts(connection)
        connection.close()

    async def _make_prompts(self, connection: ClientConnection) -> Prompts:
        text = " ".join(WORDS)
        ask = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await fetch_json(connection, "POST", "/tokenize", ask, 30.0)
            tokens = msgspec.convert(answer, _Tokens).tokens
        except (Failure, msgspec.ValidationError):
            return Prompts(self.config, list(WORDS), 1.0)
        if self.config.api == "chat" or not tokens:
            return Prompts(self.config, list(WORDS), len(WORDS) / max(1, len(tokens)))
        return Prompts(self.config, sorted(set(tokens)), 1.0)

    def body(self, index: int) -> bytes:
        """The request of `index` as JSON."""
        config = self.config
        payload: dict[str, object] = {
            "model": self.model,
            "max_tokens": config.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_segue:
            payload["return_timeline"] = True
        prompt = self.prompts.make(index)
        if config.api == "completions":
            payload["prompt"] = prompt
        else:
            payload["messages"] = [{"role": "user", "content": prompt}]
        return msgspec.json.encode(payload)

    async def one(self, index: int, due: float, connection: ClientConnection) -> RequestTimes:
        """Run request `index`, which was due at `due` (seconds of the monotonic clock)."""
        result = await stream(connection, self.path, self.body(index), self.config.timeout_s)
        sample = RequestTimes([t - due for t in result.token_times], result.end - due, error=result.error)
        sample.tokens = result.usage.completion_tokens if result.usage else len(result.token_times)
        sample.prompt_tokens = result.usage.prompt_tokens if result.usage else 0
        sample.timeline = {k: v for k, v in (result.timeline or {}).items() if k in PARTS}
        return sample

    async def closed(self, indices: Iterator[int], tick: Tick) -> list[RequestTimes]:
        """Keep `concurrency` requests in flight until `indices` are used up."""
        samples: list[RequestTimes] = []

        async def worker() -> None:
            connection = ClientConnection(self.target, self.headers)
            for index in indices:
                samples.append(await self.one(index, time.perf_counter(), connection))
                tick()
            connection.close()

        await asyncio.gather(*(worker() for _ in range(self.config.concurrency)))
        return samples

    async def open(self, indices: Iterator[int], rate: float, tick: Tick) -> list[RequestTimes]:
        """Start requests at Poisson arrivals of `rate` a second, whatever is still in flight."""
        arrivals = random.Random(f"{self.config.seed}/arrivals")
        samples: list[RequestTimes] = []
        tasks: set[asyncio.Task[None]] = set()
        due = time.perf_counter()

        async def arrive(index: int, due: float) -> None:
            connection = self._idle.pop() if self._idle else ClientConnection(self.target, self.headers)
            samples.append(await self.one(index, due, connection))
            self._idle.append(connection)
            tick()

        for index in indices:
            due += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if len(tasks) >= MAX_CONNECTIONS:
                samples.append(RequestTimes(error="client_saturated"))
                tick()
                continue
            task = awaited(arrive(index, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        for connection in self._idle:
            connection.close()
        return samples

    async def run(self, tick: Tick = lambda: None) -> dict[str, object]:
        """Warm up, measure, sum up. `tick` is called after each request, warm-up included."""
        config = self.config
        await self.prepare()
        warm = await self.closed(iter(range(-1, -1 - config.warmup, -1)), tick)
        if warm and all(s.error for s in warm):
            raise SegueError(f"no warm-up request succeeded: {warm[0].error}")
        gc.collect()
        gc.freeze()
        cpu, start = time.process_time(), time.perf_counter()
        indices = iter(range(config.requests))
        measured: Awaitable[list[RequestTimes]] = (
            self.closed(indices, tick) if config.rate is None else self.open(indices, config.rate, tick)
        )
        samples = await measured
        duration, cpu = time.perf_counter() - start, time.process_time() - cpu
        events = sum(len(s.token_s) for s in samples)
        return {
            "version": __version__,
            "command": shlex.join(["segue", *sys.argv[1:]]),
            "config": asdict(config),
            "model": self.model,
            "exact_prompt_tokens": self.prompts.exact,
            "result": summary(samples, duration, config.slo_ttft_ms, config.slo_itl_ms),
            "client": {
                "cpu_s": cpu,
                "cpu_share": cpu / duration,
                "cpu_us_per_event": 1e6 * cpu / events if events else 0.0,
            },
        }


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


def _authorization(file: str | None) -> dict[str, str]:
    """The first key of the file, or else of the variables that clients and servers use."""
    found = os.environ.get("SEGUE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
    keys = read_keys(AccessConfig(api_key=None if file else found, api_key_file=file))
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}


def bench(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON; 1 if no request completed."""
    config = config_of(args)
    measurement = Bench(config)
    with progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("requests", total=config.warmup + config.requests)
        report = uvloop.run(measurement.run(lambda: bar.advance(task)))
    if args.json == "-":
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        terminal().print(*tables(report), sep="\n")
        if args.json:
            _write(args.json, report)
    result = report["result"]
    assert isinstance(result, dict)
    return 0 if result["completed"] else 1


def _write(name: str, report: dict[str, object]) -> None:
    try:
        Path(name).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as exc:
        raise ConfigError(f"--json {name} cannot be written: {exc.strerror}") from exc


def tables(report: dict[str, object]) -> list[Table | str]:
    """The report for people."""
    result, client = report["result"], report["client"]
    assert isinstance(result, dict)
    assert isinstance(client, dict)
    errors = ", ".join(f"{kind} {count}" for kind, count in result["errors"].items()) or "none"
    head = (
        f"{result['completed']} of {result['requests']} requests of {report['model']} "
        f"in {result['duration_s']:.2f} s; errors: {errors}\n"
        f"{result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:.1f} output tokens/s"
    )
    if "goodput" in result:
        met = result["goodput"]
        head += f", goodput {met['requests_per_s']:.2f} requests/s ({met['share']:.0%})"
    latencies = Table("milliseconds", *(c for c in ("mean", "p50", "p90", "p99", "max")))
    rows = {
        "time to first token": "ttft_ms",
        "between tokens": "itl_ms",
        "per output token": "tpot_ms",
        "end to end": "e2e_ms",
    }
    for label, key in rows.items():
        _row(latencies, label, result[key])
    for name, values in result.get("ttft_split_ms", {}).items():
        _row(latencies, f"  first token: {name}", values)
    foot = (
        f"the client used {client['cpu_share']:.0%} of a core, {client['cpu_us_per_event']:.0f} µs per event"
        + ("" if report["exact_prompt_tokens"] else "; prompt lengths are approximate")
    )
    return [head, latencies, foot]


def _row(table: Table, label: str, values: dict[str, float] | None) -> None:
    if values is not None:
        table.add_row(label, *(f"{values[key]:.2f}" for key in ("mean", "p50", "p90", "p99", "max")))
