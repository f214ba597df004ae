"""What one client could spend of everybody's memory and time, in a tree of this or another commit.

    .venv/bin/python bench/holes.py [--tree /path/to/another/tree] [--only H1,H6,…]

One program for each hole, over HTTP and ZMQ, against deployments of that tree with a random two-layer model.
Prints what each found as soon as it has ended. MiB are those of all processes of the deployment: PSS, and
"peak" what the resident memory of its processes rose.

| hole | program |
|---|---|
| H1 | 80 requests with bodies of 8 MiB while one request occupies the only place |
| H2 | ten that ask for a replay of KV events and do not read; then 3,000 questions of another one |
| H4 | a stream with one short stop string, then one with 16 of 1,000 characters |
| H5 | an ambiguous grammar of 36 bytes: CPU of the engine alone for each token |
| H6 | formats that admit nothing, each once, then all of them again and again for 10 s |
| H8 | 900 connections to the ports of KV events that say nothing |
| H8b | 1,200 such connections where a process may have 1,024 descriptors, again and again for 40 s |
| H9 | one honest request before 40 others that name a lower `priority` |
| H9b | one request beside 400 with a lower `priority`, behind an older one whose prefill never answers |
| H10 | four honest requests of one `user` before 40 others, each with a `user` of its own |
| H11 | an etcd whose answer has 600 MiB; one whose answer comes a byte a second for 16 s |
| H12 | bodies of 8 MiB with many values |
| H15 | the prompt of another API key, guessed right and wrong |
| H16 | a stream of 1,000 tokens with 20 log-probabilities in SGLang's direct mode |
| H17 | `n=128` with 20 log-probabilities, 1,000 tokens |
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import from_tests  # noqa: F401
import httpx2 as httpx
import tiny_model
import zmq
import zmq.asyncio

import hostile
import per_request
from hostile import HONEST, HOSTILE, ask, members, memory_mib, resident_mib, risen_mib, status
from recorded import ROOT

COMPLETIONS = "/v1/completions"
_TICKS = os.sysconf("SC_CLK_TCK")
DEADLINE_S = 60.0


class Deployment:
    """A started one: its process id and its ports for HTTP, KV events and their replays."""

    def __init__(self, pid: int, ports: Sequence[int]) -> None:
        self.pid = pid
        self.http, self.events, self.replay = ports
        self.url = f"http://127.0.0.1:{self.http}"

    def cpu_s(self) -> float:
        return cpu_s(members(self.pid))

    async def post(self, key: str = HONEST, **body: Any) -> str:
        return await status(self.http, json.dumps({"model": "tiny", **body}).encode(), key, COMPLETIONS)

    async def gaps_ms(self, **body: Any) -> list[float]:
        """Between the tokens of a stream."""
        asked = {"model": "tiny", "prompt": prompt(64), "ignore_eos": True, "stream": True, **body}
        lines = ask(self.http, json.dumps(asked).encode(), HONEST, COMPLETIONS)
        times = [1e3 * time.perf_counter() async for line in lines if b'"text"' in line]
        return [b - a for a, b in itertools.pairwise(times)]


def cpu_s(processes: list[Path]) -> float:
    fields = [(one / "stat").read_text().rpartition(")")[2].split() for one in processes]
    return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS


def prompt(tokens: int) -> list[int]:
    return [random.randrange(256) for _ in range(tokens)]


@contextlib.asynccontextmanager
async def beside(work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def health(url: str, found: list[float]) -> AsyncIterator[None]:
    """Milliseconds that each question for `/health` took meanwhile, one after the other."""

    async def work() -> None:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            while True:
                at = time.perf_counter()
                await client.get(f"{url}/health")
                found.append(1e3 * (time.perf_counter() - at))

    async with beside(work):
        yield


# ---- one place, no keys ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def occupied(at: Deployment) -> AsyncIterator[None]:
    """The only place of the batch is taken meanwhile."""

    async def work() -> None:
        while True:
            await at.gaps_ms(max_tokens=3900, priority=-100)

    async with beside(work):
        await asyncio.sleep(0.5)  # the measurement: until it runs
        yield


async def h1(at: Deployment) -> str:
    body = {"prompt": prompt(8), "max_tokens": 1, "metadata": {"note": "x" * (8 * 2**20 - 400)}}
    raw = json.dumps({"model": "tiny", **body}).encode()
    before, resident, peak = memory_mib(at.pid), resident_mib(at.pid), 0
    async with occupied(at):
        asked = [asyncio.ensure_future(status(at.http, raw, HONEST, COMPLETIONS)) for _ in range(80)]
        waiting = 0
        for _ in range(16):
            await asyncio.sleep(0.5)  # the measurement: what they keep as time goes
            if (now := memory_mib(at.pid)) > peak:
                peak, waiting = now, sum(not one.done() for one in asked)
    answers = await asyncio.gather(*asked)
    risen = risen_mib(at.pid, resident)
    return f"{peak - before} MiB with {waiting} unanswered, peak {risen} MiB; {dict(Counter(answers))}"


async def places(at: Deployment, honest: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    ended: list[bool] = []

    async def one(body: dict[str, Any], ours: bool) -> None:
        code = await at.post(prompt=prompt(64), max_tokens=1, **body)
        if code != "200":
            raise SystemExit(f"an answer of {code}")
        ended.append(ours)

    long: dict[str, Any] = {"max_tokens": 1, "priority": -100}
    first = [asyncio.ensure_future(at.post(prompt=prompt(3900), user=f"long-{n}", **long)) for n in range(20)]
    await asyncio.sleep(0.1)  # these wait, or run, before the others come
    asked = []
    for bodies, ours in ((honest, True), (others, False)):
        asked += [asyncio.ensure_future(one(body, ours)) for body in bodies]
        await asyncio.sleep(0.1)  # honest ones arrive before the others
    early = sum(one.done() for one in asked)
    await asyncio.gather(*first, *asked)
    late = f" ({early} ended before all had come)" if early else ""
    return f"places {[n for n, ours in enumerate(ended, 1) if ours]} of {len(ended)}{late}"


async def h9(at: Deployment) -> str:
    return await places(at, [{}], [{"priority": -5}] * 40)


async def h10(at: Deployment) -> str:
    return await places(at, [{"user": "honest"}] * 4, [{"user": f"other-{n}"} for n in range(40)])


# ---- two keys -------------------------------------------------------------------------------------------


async def h2(at: Deployment) -> str:
    for _ in range(30):
        await asyncio.gather(*(at.post(prompt=prompt(3000), max_tokens=1) for _ in range(10)))
    context = zmq.asyncio.Context()
    sockets = []

    def asker() -> zmq.asyncio.Socket:
        sockets.append(context.socket(zmq.DEALER))
        sockets[-1].setsockopt(zmq.RCVHWM, 1)
        sockets[-1].setsockopt(zmq.RCVBUF, 4096)
        sockets[-1].connect(f"tcp://127.0.0.1:{at.replay}")
        return sockets[-1]

    try:
        before, used = memory_mib(at.pid), at.cpu_s()
        for _ in range(10):
            await asker().send_multipart([b"", bytes(8)])
        await asyncio.sleep(10)  # the measurement
        memory, first = memory_mib(at.pid) - before, at.cpu_s() - used
        used, one = at.cpu_s(), asker()
        for _ in range(3000):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(one.send_multipart([b"", bytes(8)]), 0.01)
        await asyncio.sleep(10)  # the measurement
        second, after = at.cpu_s() - used, memory_mib(at.pid) - before
    finally:
        for socket in sockets:
            socket.close(0)
        context.term()
    return (
        f"10 askers: {memory} MiB, {first:.1f} s of CPU in 10 s; "
        f"3,000 questions: {after} MiB, {second:.1f} s of CPU in 10 s"
    )


async def h4(at: Deployment) -> str:
    """The text is one letter again and again, with which one of the long ones begins."""
    found = []
    for stop in (["zq"], ["a" * 999 + "b", *("b" * 996 + f"{n:04d}" for n in range(15))]):
        used, began = at.cpu_s(), time.monotonic()
        await at.gaps_ms(prompt=[64] * 64, max_tokens=2000, stop=stop, logit_bias={"64": 100})
        times = [(time.monotonic() - began) / 2, (at.cpu_s() - used) / 2]
        found.append(f"{times[0]:.2f} ms, CPU {times[1]:.2f} ms")
    return f"for each token: one short {found[0]}; 16 long {found[1]}"


GRAMMAR = """
import sys, time, transformers
from segue.engine.grammar import GrammarCompiler
try:
    from segue.engine.request import Grammar
except ImportError:
    from segue.core.request import Grammar
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
eos, word = tokenizer.eos_token_id, tokenizer.encode("a")[0]
if __name__ == "__main__":
    compiler, costs, error = GrammarCompiler(tokenizer, len(tokenizer), [eos]), [], "none"
    state, text = None, "start: s\\ns: s s | /[a-z]/ | /[a-z ]/"
    while len(costs) < 200 and error == "none":
        began = time.process_time()
        try:
            state = state or compiler.open(Grammar("lark", text))
            state.admitted()
            state.accept(word)
        except Exception as refused:
            error = f"{type(refused).__name__}: {refused}"[:80]
        costs.append(1e3 * (time.process_time() - began))
    mean = sum(costs) / len(costs)
    print(f"{len(costs)} tokens, mean {mean:.2f}, longest {max(costs):.1f} ms; error {error}")
    getattr(compiler, "close", int)()
"""


def alone(program: str, *args: str, more: Sequence[Path] = ()) -> str:
    """What `program` prints, run with the tree of `PYTHONPATH` and the folders `more`."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        path = os.pathsep.join([os.environ["PYTHONPATH"], *map(str, more)])
        done = subprocess.run(
            [sys.executable, file.name, *args],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            timeout=2 * DEADLINE_S,
            check=True,
        )
    return done.stdout.strip()


def h5() -> str:
    """The engine's part alone, with the default model's words."""
    folder = next((Path.home() / ".cache/segue/models").glob("SmolLM2*"))
    return alone(GRAMMAR, str(folder))


ETCD = """
import asyncio, re, sys, time
try:
    from segue.kv.limits import Limits
    from segue.server.registry.etcd import Etcd
except ImportError:
    from segue.core.limits import Limits
    from segue.bootstrap.etcd import Etcd

def mib(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

async def main():
    etcd = Etcd([("127.0.0.1", int(sys.argv[1]))], Limits(), None)
    before, began = mib("VmRSS"), time.monotonic()
    try:
        await etcd.get(b"key")
        found = "an answer"
    except Exception as error:
        found = type(error).__name__
    print(f"{found} after {time.monotonic() - began:.1f} s, peak {mib('VmHWM') - before:.0f} MiB")
    await etcd.close()

asyncio.run(main())
"""


async def h11() -> str:
    """The client of etcd in a process of its own; the limit of a question is 5 s."""
    size, piece = 600 * 2**20, b" " * 2**20
    answer = b'{"header": {"revision": "1"}}'

    async def long(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (size + len(answer)))
        for _ in range(size // len(piece)):
            writer.write(piece)
            await writer.drain()
        writer.write(answer)

    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (16 + len(answer)))
        for _ in range(16):
            writer.write(b" ")
            await asyncio.sleep(1)  # the program: a byte a second
        writer.write(answer)

    found = []
    for name, kind in (("600 MiB", long), ("a byte a second for 16 s", slow)):

        async def serve(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            kind: Callable[[asyncio.StreamWriter], Awaitable[None]] = kind,
        ) -> None:
            # The client may close first, and the last answer is cut with the loop.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await reader.readuntil(b"\r\n\r\n")
                await kind(writer)
                await reader.read()
            writer.transport.abort()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            found.append(f"{name}: {await asyncio.to_thread(alone, ETCD, str(port))}")
    return "; ".join(found)


PASSED = """
from pair import FRONT, Pair
try:
    from segue.engine.request import Request, SamplingParams
    from segue.kv.ids import Incarnation, LeaderId
    from segue.server.messages.ticket import Ticket
    from segue.server.messages.control import Submit
except ImportError:
    from segue.core.control import Submit
    from segue.core.request import Request, SamplingParams, Ticket
    from segue.core.types import Incarnation, LeaderId

pair, order = Pair(chunk_tokens=16), []

def ask(name, prompt, prefill, priority):
    pair.rooms += 1
    request = Request(
        request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=2), priority=priority
    )
    ticket = Ticket(room=pair.rooms, attempt=0, prefill=prefill, decode=pair.decode.me, budget_s=1e4)
    for node in (pair.prefill, pair.decode):
        if node is pair.decode or prefill == pair.prefill.me:
            node.scheduler.submit(FRONT, Submit(request, ticket), pair.clock.now())

def turn():
    pair.pump()
    for node in (pair.prefill, pair.decode):
        node.turn()
    order.extend(name for name in pair.outputs if name not in order)

ask("unsettled", list(range(9)), LeaderId(Incarnation("9" * 32)), 5)
ask("first", list(range(9)), pair.prefill.me, 5)
while not order:
    turn()
come, low = 0, False
queue = pair.decode.scheduler.preallocation
while len(order) < 402:
    while come < 400 and sum(state.request.priority < 0 for state in queue) < 4:
        ask(f"urgent {come}", [300 + come] * 16, pair.prefill.me, -5)
        come += 1
    turn()
    if not low:
        ask("low", list(range(9)), pair.prefill.me, 5)
        low = True
print(f"place {order.index('low')} of {len(order) - 1}")
"""


def h9b(tree: Path) -> str:
    """The schedulers, their protocol and the simulator's engine of that tree, joined as its tests do it."""
    [pair] = (tree / "tests").rglob("pair.py")
    return alone(PASSED, more=[pair.parent])


async def h6(at: Deployment) -> str:
    formats: list[dict[str, Any]] = [
        {"guided_regex": r"[^\s\S]"},
        {"guided_json": {"type": "object", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"type": "array", "items": False, "minItems": 1}},
        {"guided_json": {"type": "string", "enum": [1]}},
        {"guided_json": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
        {"guided_json": {"type": "string", "minLength": 3, "maxLength": 2}},
    ]
    ready: Counter[int] = Counter()
    answers: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=DEADLINE_S, base_url=at.url) as client:

        async def placed() -> float:
            text = (await client.get("/metrics", headers={"authorization": f"Bearer {HONEST}"})).text
            counters = ("segue_retries_total", "segue_continuations_total")
            lines = [line for line in text.splitlines() if line.startswith(counters)]
            return sum(float(line.split()[-1]) for line in lines)

        async def look() -> None:
            while True:
                ready[(await client.get("/ready")).status_code] += 1
                await asyncio.sleep(0.02)  # so that this is a small load

        async def ask(one: dict[str, Any]) -> None:
            answers[await at.post(HOSTILE, prompt=prompt(8), max_tokens=8, **one)] += 1

        async def report() -> str:
            again = await placed() - before
            text = (
                f"answers {dict(answers)}; /ready {dict(ready)}; placed or continued again {again:.0f} times"
            )
            answers.clear()
            ready.clear()
            return text

        before = await placed()
        async with beside(look):
            for one in formats:
                await ask(one)
                await asyncio.sleep(0.2)  # what the answer has caused
            once, until = await report(), time.monotonic() + 10
            while time.monotonic() < until:
                await asyncio.gather(*map(ask, formats))
        return f"once: {once}; for 10 s: {await report()}"


async def h8(at: Deployment) -> str:
    def descriptors() -> int:
        return max(len(os.listdir(one / "fd")) for one in members(at.pid))

    before, writers = descriptors(), []
    try:
        for n in range(900):
            where = (f"127.0.1.{1 + n % 20}", 0)
            with contextlib.suppress(OSError):
                writers.append(
                    (
                        await asyncio.open_connection(
                            "127.0.0.1", (at.events, at.replay)[n % 2], local_addr=where
                        )
                    )[1]
                )
        found = descriptors() - before
        await asyncio.sleep(5)  # the measurement
        later = descriptors() - before
        code = await at.post(prompt=prompt(8), max_tokens=1)
    finally:
        for writer in writers:
            writer.transport.abort()
    return f"descriptors of one process: {found} more at once, {later} after 5 s; a request then {code}"


async def h8b(at: Deployment) -> str:
    """Descriptors that the fullest process has left, and the greeting of ZMQ to a client from elsewhere."""
    left, greeted = list[int](), Counter[bool]()
    [limit] = {
        int((one / "limits").read_text().split("Max open files")[1].split()[0]) for one in members(at.pid)
    }

    async def enemy() -> None:
        number = itertools.count()

        async def one() -> None:
            while True:
                n = next(number)
                where = (f"127.0.1.{1 + n // 2 % 20}", 0)
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", (at.events, at.replay)[n % 2], local_addr=where
                    )
                    try:
                        while await reader.read(4096):
                            pass
                    finally:
                        writer.transport.abort()
                await asyncio.sleep(0.2)  # a client's pause, not a wait for an event

        await asyncio.gather(*(one() for _ in range(1200)))

    async def honest() -> bool:
        writer = None
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", at.events)
                return len(await reader.readexactly(10)) == 10
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            return False
        finally:
            if writer is not None:
                writer.transport.abort()

    async with beside(enemy):
        await asyncio.sleep(2)  # until all have tried
        until = time.monotonic() + 38
        while time.monotonic() < until:
            left.append(limit - max(len(os.listdir(one / "fd")) for one in members(at.pid)))
            greeted[await honest()] += 1
            await asyncio.sleep(0.5)  # the measurement
        code = await at.post(prompt=prompt(8), max_tokens=1)
    none = sum(not count for count in left)
    return (
        f"descriptors left: least {min(left)}, most {max(left)}, none in {none} of {len(left)} looks; "
        f"a client greeted within 5 s: {greeted[True]} of {sum(greeted.values())}; a request then {code}"
    )


async def h12(at: Deployment) -> str:
    size = 8 * 2**20 - 400
    kinds = {
        "token ids": '"prompt":[' + ",".join("1" * (size // 2)) + "]",
        "stop strings": '"prompt":[1],"stop":[' + ",".join(['""'] * (size // 3)) + "]",
        "biases": '"prompt":[1],"logit_bias":' + json.dumps({str(n): 1 for n in range(size // 14)}),
        "fractions": '"prompt":[' + ",".join(["0.5"] * (size // 4)) + "]",
    }
    found, quiet = [], list[float]()
    async with health(at.url, quiet):
        await asyncio.sleep(2)  # the measurement
    for name, values in kinds.items():
        raw = f'{{"model":"tiny","max_tokens":1,{values}}}'.encode()
        longest = []
        for _ in range(3):
            gaps: list[float] = []
            async with health(at.url, gaps):
                await asyncio.sleep(0.2)
                code = await status(at.http, raw, HOSTILE, COMPLETIONS)
                await asyncio.sleep(0.2)
            longest.append(max(gaps))
        found.append(f"{name} {statistics.median(longest):.0f} ms ({code})")
    return f"longest /health, median of 3: {', '.join(found)}; without {max(quiet):.0f} ms"


async def h15(at: Deployment) -> str:
    secret, other = prompt(64), prompt(64)
    wrong = [*other[:20], *prompt(44)]
    asks = [(HONEST, secret), (HONEST, other), (HOSTILE, wrong), (HOSTILE, secret), (HONEST, secret)]
    found = []
    async with httpx.AsyncClient(timeout=DEADLINE_S, base_url=at.url) as client:
        for key, asked in asks:
            answer = await client.post(
                COMPLETIONS,
                json={"model": "tiny", "prompt": asked, "max_tokens": 1},
                headers={"authorization": f"Bearer {key}"},
            )
            found.append((answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))
    return f"cached_tokens of 64: wrong after 20 tokens {found[2]}, right {found[3]}, own again {found[4]}"


async def h17(at: Deployment) -> str:
    before, resident, gaps, used = memory_mib(at.pid), resident_mib(at.pid), list[float](), at.cpu_s()
    began = time.monotonic()
    async with health(at.url, gaps):
        code = await at.post(prompt=prompt(8), max_tokens=1000, ignore_eos=True, n=128, logprobs=20)
    took = time.monotonic() - began
    peak, after = risen_mib(at.pid, resident), memory_mib(at.pid) - before
    return (
        f"{code} in {took:.1f} s; peak {peak} MiB, after {after} MiB; "
        f"longest /health {max(gaps, default=0.0):.0f} ms; CPU {at.cpu_s() - used:.1f} s"
    )


# ---- direct mode ----------------------------------------------------------------------------------------


async def h16(tree: Path, model: Path) -> str:
    with per_request.deployment(tree, model) as pids:
        decode = [Path(f"/proc/{pids[1]}")]
        room = random.randrange(1, 2**63)
        found = []
        for logprobs in (False, True):
            room += 1
            where = {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": per_request.REGISTRY,
                "bootstrap_room": room,
            }
            sampling = {"max_new_tokens": 1000, "ignore_eos": True}
            body = {"input_ids": prompt(64), "sampling_params": sampling, "stream": True, **where}
            raw = json.dumps({**body, "return_logprob": logprobs, "top_logprobs_num": 20}).encode()
            used = cpu_s(decode)
            codes = await asyncio.gather(
                *(
                    status(port, raw, HONEST, "/generate")
                    for port in (per_request.PREFILL, per_request.DECODE)
                )
            )
            found.append(f"{cpu_s(decode) - used:.1f} s ({', '.join(codes)})")
    return f"CPU of the decode instance: without log-probabilities {found[0]}, with {found[1]}"


#: by deployment: one place in the batch, no keys; no keys; prefill and decode; keys; few descriptors
ALONE = {"H1": h1}
OPEN = {"H9": h9, "H10": h10}
PAIR = {"H6": h6}
KEYS = {"H2": h2, "H4": h4, "H8": h8, "H12": h12, "H15": h15, "H17": h17}
FEW = {"H8b": h8b}
#: those without a deployment of `segue serve`
OTHERS: dict[str, Callable[[Path, Path], str]] = {
    "H5": lambda _tree, _model: h5(),
    "H9b": lambda tree, _model: h9b(tree),
    "H11": lambda _tree, _model: asyncio.run(h11()),
    "H16": lambda tree, model: asyncio.run(h16(tree, model)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    every = [*ALONE, *OPEN, *PAIR, *KEYS, *FEW, *OTHERS]
    parser.add_argument("--only", type=lambda text: text.split(","), default=every)
    args = parser.parse_args()
    os.environ |= {"PYTHONPATH": str(args.tree / "src"), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.save(Path(folder))
        flags = ["--model", folder, "--served-model-name", "tiny", "--dtype", "float32"]
        flags += ["--kv-gib", "0.05", "--threads-per-worker", "1"]
        one = ["--unified"]
        for holes, more, api_keys in (
            (ALONE, [*one, "--max-batch", "1"], False),
            (OPEN, one, False),
            (PAIR, ["--decode", "2"], True),
            (KEYS, one, True),
            (FEW, one, True),
        ):
            if chosen := [name for name in holes if name in args.only]:
                nofile = 1024 if holes is FEW else None
                with hostile.deployment([*flags, *more], api_keys, nofile) as (process, ports):
                    at = Deployment(process.pid, ports)
                    asyncio.run(at.gaps_ms(max_tokens=50))  # the first requests warm up
                    for name in chosen:
                        try:
                            found = asyncio.run(asyncio.wait_for(holes[name](at), 2 * DEADLINE_S))
                        except TimeoutError:
                            found = f"no end within {2 * DEADLINE_S:.0f} s"
                        print(f"{name}: {found}", flush=True)
        for name in (name for name in OTHERS if name in args.only):
            print(f"{name}: {OTHERS[name](args.tree, model)}", flush=True)


if __name__ == "__main__":
    main()
