"""The effect of hostile clients on ten honest streams of one deployment.

    .venv/bin/python bench/hostile.py [--seconds 20] [--only NAME,…] [--save FILE]

Starts `segue serve` with two API keys and KV events. Ten clients stream with the first key, without and with
each hostile load in turn; a load runs until its honest streams have ended. Reported for each load: the tail
between tokens beside that of the undisturbed round before it, the memory of the deployment (PSS before and
after, and before plus what the resident memory of its processes rose meanwhile) and the answers that the
hostile clients got. The loads use this machine's CPU, too: their CPU seconds are reported.

| load | what it does |
|---|---|
| bodies | 80 connections, each with a body of 8 MiB, again and again |
| values | 80 connections, each with a body of as many lists, keys, fractions or integers as it may have |
| one | 2,000 connections to the HTTP port from one address that say nothing |
| keys | 10,000 requests with wrong keys |
| silent | 2,000 connections to the HTTP port that say nothing |
| subscribers | 2,000 connections to the ports of KV events that say nothing |
| schemas | formats that cost much to compile or to follow, four at a time |
| stops | four streams with 16 stop strings of 1,000 characters |
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from recorded import commit, quantile

HONEST, HOSTILE = "key-of-honest-clients", "key-of-hostile-clients"
STREAMS, TOKENS = 10, 48
READY_S = 300.0
#: Each costs seconds or hundreds of MiB where nothing bounds it, or admits nothing.
FORMATS: list[dict[str, Any]] = [
    {"guided_json": {"type": "integer", "multipleOf": 999983}},
    {"guided_json": {"type": "object", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}},
    {"guided_json": {"$ref": "#"}},
    {"guided_regex": r"[^\s\S]"},
    {"guided_regex": "(a{1,1000}){1,1000}"},
    {"guided_regex": "(.*a.{200}|.*b.{300})"},
    {"guided_grammar": "start: s\ns: s s | /[a-z]/ | /[a-z ]/"},
    {"guided_grammar": 'start: s\ns: s s | /a/ | ""'},
]


#: Values, each about as often as a body may have it.
VALUES = {"[]": 125_000, "1.5": 125_000, '{"k":1,"l":2}': 80_000, "1": 750_000}


async def ask(port: int, body: bytes, key: str, path: str = "/v1/chat/completions") -> AsyncIterator[bytes]:
    """The lines of one answer, the status line first; the connection ends with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        )
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # refused before the whole body was read
            writer.write(body)
            await writer.drain()
        while line := await reader.readline():
            yield line
    finally:
        writer.transport.abort()


async def status(port: int, body: bytes, key: str, path: str = "/v1/chat/completions") -> str:
    """The status of one answer, which is read to its end; `cut` if there was none."""
    found = "cut"
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
        async for line in ask(port, body, key, path):
            if found == "cut":
                found = line.split()[1].decode()
    return found


def chat(text: str = "Tell me a story about a river.", **more: Any) -> bytes:
    said = [{"role": "user", "content": text}]
    return json.dumps({"messages": said, "temperature": 0, **more}).encode()


async def streams(port: int) -> list[float]:
    """Milliseconds between tokens of `STREAMS` honest clients."""
    gaps: list[float] = []

    async def client(number: int) -> None:
        body = chat(f"Tell me story {number}.", max_tokens=TOKENS, ignore_eos=True, stream=True)
        last, lines = 0.0, list[bytes]()
        async for line in ask(port, body, HONEST):
            lines.append(line)
            if b'"content"' in line:
                now = time.perf_counter()
                if last:
                    gaps.append(1e3 * (now - last))
                last = now
        if not any(b"[DONE]" in line for line in lines):
            raise SystemExit(f"an honest stream did not end as it should: {b''.join(lines)[-500:]!r}")

    await asyncio.gather(*(client(number) for number in range(STREAMS)))
    return gaps


# ---- hostile loads: each runs until it is cancelled ----------------------------------------------------


async def many(count: int, one: Callable[[], Coroutine[Any, Any, str]], seen: Counter[str]) -> None:
    """`count` tasks that do `one` again and again."""

    async def repeat() -> None:
        while True:
            seen[await one()] += 1

    await asyncio.gather(*(repeat() for _ in range(count)))


async def bodies(ports: list[int], seen: Counter[str]) -> None:
    body = chat(metadata={"note": "x" * (8 * 2**20 - 400)}, max_tokens=1)
    await many(80, lambda: status(ports[0], body, HOSTILE), seen)


async def values(ports: list[int], seen: Counter[str]) -> None:
    turn = 0
    texts = [",".join([one] * count) for one, count in VALUES.items()]
    made = [
        chat(max_tokens=1)[:-1] + b', "chat_template_kwargs": {"a": [%b]}}' % text.encode() for text in texts
    ]

    async def one() -> str:
        nonlocal turn
        turn += 1
        return await status(ports[0], made[turn % len(made)], HOSTILE)

    await many(80, one, seen)


async def keys(ports: list[int], seen: Counter[str]) -> None:
    async def one() -> None:
        seen[await status(ports[0], chat(max_tokens=1), f"wrong-{os.urandom(4).hex()}")] += 1

    for _ in range(10_000 // 20):
        await asyncio.gather(*(one() for _ in range(20)))


async def connections(ports: list[int], seen: Counter[str], addresses: int = 20) -> None:
    async def one() -> str:
        try:
            where = (f"127.0.1.{1 + os.urandom(1)[0] % addresses}", 0)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", ports[os.urandom(1)[0] % len(ports)], local_addr=where
            )
        except OSError:
            await asyncio.sleep(0.1)  # a client's pause, not a wait for an event
            return "refused"
        try:
            while await reader.read(4096):
                pass
        except OSError:
            pass
        finally:
            writer.transport.abort()
        return "cut"

    await many(2000, one, seen)


async def silent(ports: list[int], seen: Counter[str]) -> None:
    await connections(ports[:1], seen)


async def one(ports: list[int], seen: Counter[str]) -> None:
    await connections(ports[:1], seen, addresses=1)


async def subscribers(ports: list[int], seen: Counter[str]) -> None:
    await connections(ports[1:], seen)


async def schemas(ports: list[int], seen: Counter[str]) -> None:
    turn = 0

    async def one() -> str:
        nonlocal turn
        turn += 1
        return await status(ports[0], chat(max_tokens=64, **FORMATS[turn % len(FORMATS)]), HOSTILE)

    await many(4, one, seen)


async def stops(ports: list[int], seen: Counter[str]) -> None:
    text = [" a" * 498 + f" {number}" for number in range(16)]
    body = chat(" a" * 60, max_tokens=64, stop=text, ignore_eos=True, stream=True)
    await many(4, lambda: status(ports[0], body, HOSTILE), seen)


LOADS = {load.__name__: load for load in (bodies, values, keys, silent, one, subscribers, schemas, stops)}


def hostile(pipe: Connection, ports: list[int]) -> None:
    """A process that runs the loads it is told: a name begins one, "" ends it and is answered."""

    async def main() -> None:
        while name := await asyncio.to_thread(pipe.recv):
            seen: Counter[str] = Counter()
            used = time.process_time()
            task = asyncio.create_task(LOADS[name](ports, seen))
            await asyncio.to_thread(pipe.recv)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            pipe.send((dict(seen), time.process_time() - used))

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(main())


# ---- the deployment ------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def deployment(flags: list[str], api_keys: bool = True, nofile: int | None = None) -> Any:
    """`segue serve`: its process and its ports, that for HTTP first. Each of its processes may have `nofile`
    descriptors."""
    events, replay = free_port(), free_port()
    with tempfile.NamedTemporaryFile("w") as keys_file:
        keys_file.write(f"{HONEST}\n{HOSTILE}\n")
        keys_file.flush()
        named = ["--kv-events-port", str(events), "--kv-events-replay-port", str(replay)]
        named += ["--api-key-file", keys_file.name] if api_keys else []
        limits = ["prlimit", f"--nofile={nofile}:{nofile}"] if nofile is not None else []
        command = [*limits, sys.executable, "-m", "segue.cli.main", "serve", "--port", "0", *named, *flags]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                assert process.stdout is not None
                url = next((line for line in process.stdout if line.startswith("ready ")), None)
                if url is None:
                    log.seek(0)
                    raise SystemExit(f"segue serve did not start:\n{log.read()[-2000:]}")
                yield process, [int(re.findall(r":(\d+)", url)[0]), events, replay]
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def members(pid: int) -> list[Path]:
    """The folders in `/proc` of a process and of all that it started."""
    found = [Path(f"/proc/{pid}")]
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += members(int(child))
    return found


def mib(process: Path, file: str, name: str) -> float:
    """A figure of one process that the kernel gives in kB; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return sum(map(int, re.findall(rf"^{name}:\s+(\d+)", (process / file).read_text(), re.M))) / 1024
    return 0.0


def memory_mib(pid: int) -> int:
    """PSS of a process and all that it started."""
    return round(sum(mib(one, "smaps_rollup", "Pss") for one in members(pid)))


def resident_mib(pid: int) -> dict[Path, float]:
    """The resident memory of each process; the kernel's record of its peak begins here."""
    for one in members(pid):
        with contextlib.suppress(OSError):
            (one / "clear_refs").write_text("5")
    return {one: mib(one, "status", "VmRSS") for one in members(pid)}


def risen_mib(pid: int, before: dict[Path, float]) -> int:
    """How far each process rose above `before` at its peak, together."""
    return round(sum(mib(one, "status", "VmHWM") - before.get(one, 0.0) for one in members(pid)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of honest streams in each round")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(LOADS))
    parser.add_argument("--save", type=Path, help="write all of it as JSON")
    parser.add_argument("flags", nargs="*", help="flags of segue serve, after --")
    args = parser.parse_args()

    def round_of(port: int) -> list[float]:
        found: list[float] = []
        until = time.monotonic() + args.seconds
        while time.monotonic() < until:
            found += asyncio.run(streams(port))
        return found

    rounds = []
    context = multiprocessing.get_context("spawn")
    with deployment(args.flags) as (process, ports):
        pipe, theirs = context.Pipe()
        enemy = context.Process(target=hostile, args=(theirs, ports), daemon=True)
        enemy.start()
        asyncio.run(streams(ports[0]))  # the first requests warm up
        print("| load | without: p50, p99, ms | with | ratio | MiB: before, after, peak | answers | CPU, s |")
        print("|---|---|---|---|---|---|---|")
        for name in args.only:
            without, before = round_of(ports[0]), memory_mib(process.pid)
            resident = resident_mib(process.pid)
            pipe.send(name)
            found = round_of(ports[0])
            pipe.send("")
            seen, used = pipe.recv()
            memory = [before, memory_mib(process.pid), before + risen_mib(process.pid, resident)]
            tails = [[round(quantile(gaps, q), 1) for q in (0.5, 0.99)] for gaps in (without, found)]
            ratio = [round(b / a, 2) for a, b in zip(*tails, strict=True)]
            rounds.append({"load": name, "without_ms": tails[0], "with_ms": tails[1], "ratio": ratio})
            rounds[-1] |= {"mib": memory, "answers": seen, "load_cpu_s": round(used, 1)}
            print(
                f"| {name} | {tails[0]} | {tails[1]} | {ratio} | {memory} | {seen} | {used:.1f} |",
                flush=True,
            )
        pipe.send(None)
        enemy.join(10)
    if args.save:
        report = {"commit": commit(), "args": sys.argv[1:], "streams": STREAMS, "rounds": rounds}
        args.save.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
