"""SegueConnector beside vLLM's NixlConnector: the time between prefill and decode, CPU, failures.

    python bench/vllm_beside_nixl.py times --systems nixl-tcp,segue-tcp,segue-tcp-off --json FILE
    python bench/vllm_beside_nixl.py faults --systems nixl-tcp,segue-tcp --json FILE

Needs the environment of `make test-vllm`, and `nixl` and `nixl-cu12` in it. `times`: the systems alternate,
and their order turns round each time. Time stamps are taken inside the calls that vLLM makes to either
connector (`vllm_side.py`).
`faults`: a prefill that is killed or stopped before decode asks, a decode that is killed, and a decode that
asks 45 s after prefill has answered.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import from_tests  # noqa: F401
from engines import TO_PREFILL, Clients, Engine, make_model, prompts, transfer_config, unified

from ports import HeldPort
from recorded import commit, quantile

#: 32 KiB of KV a token in float32, about that of a model of 135 million parameters; little to compute.
MODEL = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
ARGUMENTS: dict[str, Any] = {
    "max_model_len": 1152,
    "num_gpu_blocks_override": 200,
    "max_num_batched_tokens": 512,
}
SIZES = (128, 512, 1024)
TOKENS_OUT = 8
#: Requests of one measurement, by how many are asked at once.
REQUESTS = {1: 4, 4: 8}
LATE_S = 45.0
START_S = 250.0
OTHERS = 14


class System:
    """A prefill and a decode that hand over KV in one way: `nixl` (UCX chooses, which is shared memory on one
    host), `nixl-tcp` (UCX_TLS=tcp), or `segue-TRANSPORT` with any of `-off` (no checksums), `-agent` (the
    manager in a process of its own) and `-concurrent` (both legs are asked at once)."""

    def __init__(self, name: str, model: Path, log: Path, **more: Any) -> None:
        self.name = name
        self.query = HeldPort()
        self.concurrent = "concurrent" in name
        self._model, self._log, self._more = model, log, more
        self._count = 0
        self.prefill, self.decode = self.start("kv_producer"), self.start("kv_consumer")

    def start(self, role: str) -> Engine:
        """One more engine of this system."""
        self._count += 1
        env: dict[str, str] = {}
        ours, *parts = self.name.split("-")
        if ours == "segue":
            extra: dict[str, Any] = {"transport": parts[:1], "agent": "agent" in parts}
            extra["kv_checksum"] = "off" if "off" in parts else "full"
            if role == "kv_producer":
                extra["query_port"] = self.query.port
            config = transfer_config(role, **extra)
        else:
            config = {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
            }
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(HeldPort().port)
            if parts:
                env["UCX_TLS"] = parts[0]
        name = f"{self.name}-{role}-{self._count}"
        core = 0 if role == "kv_producer" else 1
        arguments = {**ARGUMENTS, **self._more} if role == "kv_producer" else ARGUMENTS
        return Engine(
            name, core, self._log, env=env, model=str(self._model), kv_transfer_config=config, **arguments
        )

    def wait(self) -> None:
        """Until both can be asked."""
        for engine in (self.prefill, self.decode):
            engine.wait(START_S)

    @property
    def clients(self) -> Clients:
        """Those that ask this pair."""
        return Clients(self.prefill, self.decode, self.query.port)

    def close(self) -> None:
        """End both."""
        self.prefill.close()
        self.decode.close()


@contextmanager
def systems(names: list[str], **more: Any) -> Iterator[list[System]]:
    """These systems, side by side."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_model(Path(folder) / "model", **MODEL)
        made = []
        for name in names:
            made.append(System(name, model, Path(folder), **more))
            stack.callback(made[-1].close)
        for system in made:
            system.wait()
        yield made


@contextmanager
def alone(system: System, made: list[System]) -> Iterator[None]:
    """The others are stopped meanwhile: threads of theirs that poll would take the cores."""
    others = [engine for other in made if other is not system for engine in (other.prefill, other.decode)]
    for engine in others:
        engine.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        for engine in others:
            engine.kill(signal.SIGCONT)


def cpu_s(engine: Engine) -> float:
    """CPU seconds of all threads of an engine's process and of those that it has started."""
    tasks = Path(f"/proc/{engine.process.pid}/task").iterdir()
    started = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return sum(time.clock_gettime((~int(pid) << 3) | 2) for pid in (engine.process.pid, *started))


def measure(system: System, label: str, size: int, at_once: int) -> dict[str, Any]:
    """One system, once: as many requests as REQUESTS says."""
    asked = prompts(REQUESTS[at_once], seed=size + at_once, low=size, high=size)
    sides = (system.prefill, system.decode)
    cpu, begin = sum(map(cpu_s, sides)), time.perf_counter()
    ask = system.clients.concurrent if system.concurrent else system.clients.sequential
    tokens = ask(label, asked, at_once, TOKENS_OUT)
    wall = time.perf_counter() - begin
    cpu = sum(map(cpu_s, sides)) - cpu
    gaps = []
    for number in range(len(asked)):
        computed = system.prefill.answer(f"p{label}{number}")["computed"]
        gaps.append(1000 * (system.decode.answer(f"d{label}{number}")["began"] - computed))
    return {
        "system": system.name,
        "size": size,
        "at_once": at_once,
        "gap_ms": gaps,
        "cpu_ms": 1000 * cpu / len(asked),
        "tokens_per_s": TOKENS_OUT * len(asked) / wall,
        "tokens": tokens,
    }


def times(names: list[str], rounds: int, within_s: float) -> dict[str, Any]:
    """All measurements of all systems, alternating: as many rounds as end `within_s` seconds."""
    begin, took = time.monotonic(), 0.0
    rows: list[dict[str, Any]] = []
    wrong = 0
    with systems(names) as made:
        wanted = {
            (size, at_once): unified(
                made[0].decode,
                f"u{size}-{at_once}-",
                prompts(REQUESTS[at_once], seed=size + at_once, low=size, high=size),
            )
            for size in SIZES
            for at_once in REQUESTS
        }
        for number in range(-1, rounds):  # the first one opens paths, and is not counted
            if time.monotonic() - begin + took > within_s:
                break
            started = time.monotonic()
            for size in SIZES:
                for at_once in REQUESTS:
                    for system in made if number % 2 else reversed(made):
                        with alone(system, made):
                            row = measure(system, f"{number}-{size}-{at_once}-", size, at_once)
                        wrong += row.pop("tokens") != wanted[size, at_once]
                        if number >= 0:
                            rows.append({"round": number, **row})
            took = time.monotonic() - started
    return {"wrong_answers": wrong, "summary": summary(rows), "rows": rows}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median, least and most of each system's rounds."""
    found = []
    for size in SIZES:
        for at_once in REQUESTS:
            for name in dict.fromkeys(row["system"] for row in rows):
                mine = [r for r in rows if (r["system"], r["size"], r["at_once"]) == (name, size, at_once)]
                gaps = [statistics.median(row["gap_ms"]) for row in mine]
                line: dict[str, Any] = {"system": name, "size": size, "at_once": at_once}
                for field, values in (
                    ("gap_ms", gaps),
                    ("cpu_ms", [row["cpu_ms"] for row in mine]),
                    ("tokens_per_s", [row["tokens_per_s"] for row in mine]),
                ):
                    line[field] = [round(quantile(values, q), 1) for q in (0.5, 0, 1)]
                found.append(line)
    return found


# ---- failures ------------------------------------------------------------------------------------------


def fate(engine: Engine, name: str, begin: float, wanted: list[int], within_s: float) -> dict[str, Any]:
    """How a request to decode ended."""
    try:
        answer = engine.answer(name, within_s)
    except AssertionError:
        return {"outcome": f"no answer in {within_s:g} s"}
    right = answer["tokens"] == wanted
    outcome = "right tokens" if right else "wrong tokens" if answer["reason"] == "length" else "error"
    return {"outcome": outcome, "seconds": round(time.perf_counter() - begin, 2)}


def prefill_params(system: System, label: str, asked: list[list[int]]) -> list[Any]:
    """Prefill's answers."""
    for number, tokens in enumerate(asked):
        system.prefill.ask(f"{label}{number}", tokens, 1, TO_PREFILL)
    return [system.prefill.answer(f"{label}{number}")["params"] for number in range(len(asked))]


def late(made: list[System]) -> Iterator[dict[str, Any]]:
    """Decode asks LATE_S after prefill's answer; OTHERS prompts go through prefill's few blocks meanwhile."""
    asked, others = prompts(2, seed=21, low=190), prompts(OTHERS, seed=22, low=190)
    answers = {}
    begin = time.perf_counter()
    for system in made:
        answers[system.name] = prefill_params(system, "late-p", asked)
    for number, tokens in enumerate(others):
        time.sleep(max(0.0, begin + LATE_S * (number + 1) / (OTHERS + 1) - time.perf_counter()))
        for system in made:
            system.prefill.ask(f"other{number}", tokens, 1)
    time.sleep(max(0.0, begin + LATE_S - time.perf_counter()))
    for system in made:
        for number in range(OTHERS):
            system.prefill.answer(f"other{number}")
        wanted = unified(system.decode, "late-u", asked)
        for number, tokens in enumerate(asked):
            now = time.perf_counter()
            system.decode.ask(f"late-d{number}", tokens, TOKENS_OUT, answers[system.name][number])
            found = fate(system.decode, f"late-d{number}", now, wanted[number], 60)
            yield {"system": system.name, "fault": f"decode {LATE_S:g} s late", **found}


def decode_killed(made: list[System]) -> Iterator[dict[str, Any]]:
    """Decode dies while it loads: how long prefill keeps the blocks."""
    [tokens] = prompts(1, seed=23, low=190)
    begin, free = {}, {}
    for system in made:
        free[system.name] = system.prefill.counts()["free_blocks"]
        [params] = prefill_params(system, "dk-p", [tokens])
        system.prefill.kill(signal.SIGSTOP)
        system.decode.ask("dk-d", tokens, TOKENS_OUT, params)
        system.decode.counts()
        system.decode.kill()
        system.decode.process.wait(20)
        system.prefill.kill(signal.SIGCONT)
        begin[system.name] = time.perf_counter()
    waiting = list(made)
    while waiting and time.perf_counter() - max(begin.values()) < 120:
        for system in list(waiting):
            row = {"system": system.name, "fault": "decode killed"}
            try:
                if system.prefill.counts()["free_blocks"] != free[system.name]:
                    continue
                row["outcome"] = "prefill's blocks are free"
            except (AssertionError, BrokenPipeError):
                row["outcome"] = "prefill has ended"
                row["log"] = system.prefill.log.read_text().rstrip().splitlines()[-1][-200:]
            waiting.remove(system)
            yield {**row, "seconds": round(time.perf_counter() - begin[system.name], 1)}
        time.sleep(0.1)  # the engine is asked, and says nothing by itself
    for system in waiting:
        yield {"system": system.name, "fault": "decode killed", "outcome": "prefill's blocks are held"}
    for system in made:
        system.decode = system.start("kv_consumer")
        if system.prefill.process.poll() is not None:
            system.prefill = system.start("kv_producer")
    for system in made:
        system.wait()


def prefill_ends(made: list[System], fault: str, number: int) -> Iterator[dict[str, Any]]:
    """Prefill is stopped or killed before decode asks; they had handed over a prompt before."""
    first, second = prompts(2, seed=24, low=190)
    for system in made:
        system.clients.sequential(f"{fault}-first", [first])
        [wanted] = unified(system.decode, f"{fault}-u", [second])
        [params] = prefill_params(system, f"{fault}-p", [second])
        system.prefill.kill(number)
        begin = time.perf_counter()
        system.decode.ask(f"{fault}-d", second, TOKENS_OUT, params)
        found = fate(system.decode, f"{fault}-d", begin, wanted, 45)
        yield {"system": system.name, "fault": f"prefill {fault}", **found}
        system.prefill.kill(signal.SIGCONT)


def faults(names: list[str]) -> dict[str, Any]:
    """All faults; prefill has 24 blocks."""
    rows: list[dict[str, Any]] = []
    steps: list[Callable[[list[System]], Iterator[dict[str, Any]]]] = [
        late,
        decode_killed,
        lambda made: prefill_ends(made, "stopped", signal.SIGSTOP),
        lambda made: prefill_ends(made, "killed", signal.SIGKILL),
    ]
    with systems(names, num_gpu_blocks_override=24, max_model_len=512) as made:
        for step in steps:
            for row in step(made):
                print(json.dumps(row), flush=True)
                rows.append(row)
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["times", "faults"])
    parser.add_argument("--systems", default="nixl-tcp,segue-tcp,segue-tcp-off")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--within", type=float, default=280.0, help="seconds; fewer rounds if it takes longer"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.systems.split(",")
    found = times(names, arguments.rounds, arguments.within) if arguments.what == "times" else faults(names)
    for line in found.get("summary", ()):
        print(json.dumps(line))
    if arguments.json:
        about = {"command": " ".join(sys.argv), "commit": commit(), "load": os.getloadavg()}
        arguments.json.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
