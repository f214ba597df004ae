"""vLLM engines as processes of their own (`vllm_side.py` in the environment `.venv-vllm`), and clients."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

BLOCK = 32
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 256,
    "enable_prefix_caching": False,
    "max_num_seqs": 8,
    # Prompts of more than 64 tokens are computed in chunks.
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
}
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def environment(core: int | str) -> dict[str, str]:
    """Of a vLLM whose forward runs on one core; `"nobind"`: on any. `plugins` has a plug-in for ranks."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{HERE / 'plugins'}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NO_USAGE_STATS": "1",
    }


def make_model(folder: Path, **sizes: int) -> Path:
    """The dummy model, written by vLLM's own environment; `sizes` are those of `LlamaConfig`."""
    command = [PYTHON, HERE / "dummy_model.py", folder, json.dumps(sizes)]
    subprocess.run(command, env=environment(0), check=True, timeout=120, capture_output=True)
    return folder


def transfer_config(role: str, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """`--kv-transfer-config` of one side."""
    return {
        "kv_connector": "SegueConnector",
        "kv_connector_module_path": "segue.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the dummy model, of random weights."""
    from safetensors.numpy import save_file

    draw = np.random.default_rng(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_{half}.weight": draw.normal(
            0, 0.5, shape
        ).astype(np.float32)
        for layer in range(2)
        for name, rows in (("q", 128), ("v", 64))
        for half, shape in (("A", (8, 128)), ("B", (rows, 8)))
    }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0})
    )
    return folder


class Engine:
    """One engine, which starts beside others; `wait` is for its start. Events come by a thread of their own;
    each wait has a deadline."""

    def __init__(
        self, name: str, core: int, log: Path, *, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        self.name = name
        command = [str(PYTHON), str(HERE / "vllm_side.py"), json.dumps({**ENGINE, **arguments})]
        with (log / f"{name}.log").open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                env={**environment(core), **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.log = log / f"{name}.log"
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        #: how each request ended, by its id
        self.done: dict[str, dict[str, Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.version = ""

    def wait(self, within_s: float = 150) -> Engine:
        """The engine, once it can be asked."""
        try:
            self.version = self.version or self.event("ready", within_s)["version"]
        except AssertionError:
            self.close()
            raise
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._events.put(json.loads(line))
        self._events.put(None)

    def send(self, **line: Any) -> None:
        """One line of `vllm_side.py`'s input."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def event(self, kind: str, within_s: float = 60) -> dict[str, Any]:
        """The next event of this kind; answers on the way are kept in `done`."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.name}: no {kind} within {within_s} s, see {self.log}") from None
            assert event is not None, f"{self.name} has ended, see {self.log}"
            if event["event"] == "done":
                self.done[event["id"]] = event
            if event["event"] == kind:
                return event

    def ask(
        self, name: str, tokens: list[int], count: int, params: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """Begin a request."""
        self.send(id=name, tokens=tokens, max_tokens=count, params=params, **more)

    def answer(self, name: str, within_s: float = 60) -> dict[str, Any]:
        """The end of a request."""
        deadline = time.monotonic() + within_s
        while name not in self.done:
            self.event("done", deadline - time.monotonic())
        return self.done[name]

    def counts(self) -> dict[str, Any]:
        """What is held now."""
        self.send(count=True)
        return self.event("counts")

    def at_rest(self, within_s: float = 30) -> dict[str, Any]:
        """What is held when no request, room or pin is left. Not judged here: sessions (`peers`), what the
        protocol remembers of ended hand-offs (`ended`, `deadlines`), descriptors."""
        deadline = time.monotonic() + within_s
        while True:
            counts = self.counts()
            held = {k: n for k, n in counts["held"].items() if n and k not in ("peers", "ended", "deadlines")}
            if not held and not counts["requests"]:
                return counts
            assert time.monotonic() < deadline, (self.name, counts)
            time.sleep(0.05)  # the engine is asked, and says nothing by itself

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the engine."""
        self.process.send_signal(number)

    def close(self) -> None:
        """End it, by its input's end if it still can."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.kill(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self._reader.join(20)


def prompts(count: int, seed: int, low: int = 40, high: int = 200) -> list[list[int]]:
    """Random prompts of `low` to `high` tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(512) for _ in range(draw.randint(low, high))] for _ in range(count)]


def unified(engine: Engine, label: str, asked: Iterable[list[int]], count: int = 8) -> list[list[int]]:
    """The engine's answers to prompts that it computes itself."""
    names = []
    for number, tokens in enumerate(asked):
        names.append(f"{label}{number}")
        engine.ask(names[-1], tokens, count)
    return [engine.answer(name)["tokens"] for name in names]


class Clients:
    """Asks pairs of engines as routers do, `at_once` requests at a time."""

    def __init__(self, prefill: Engine, decode: Engine, query_port: int = 0) -> None:
        self.prefill, self.decode, self.query_port = prefill, decode, query_port

    def sequential(
        self, label: str, asked: list[list[int]], at_once: int = 8, count: int = 8
    ) -> list[list[int]]:
        """Prefill first; its answer's params go to decode."""

        def begin(number: int) -> None:
            self.prefill.ask(f"p{label}{number}", asked[number], 1, TO_PREFILL)

        def go_on(number: int) -> None:
            params = self.prefill.answer(f"p{label}{number}")["params"]
            self.decode.ask(f"d{label}{number}", asked[number], count, params)

        return self._all(label, len(asked), at_once, begin, go_on)

    def concurrent(
        self, label: str, asked: list[list[int]], at_once: int = 8, count: int = 8
    ) -> list[list[int]]:
        """Both at once, with one `transfer_id`."""
        engine_id = self.engine_id()

        def begin(number: int) -> None:
            to_prefill, to_decode = self.transfer(f"{label}{number}", engine_id)
            self.decode.ask(f"d{label}{number}", asked[number], count, to_decode)
            self.prefill.ask(f"p{label}{number}", asked[number], 1, to_prefill)

        return self._all(label, len(asked), at_once, begin, lambda number: None)

    def transfer(self, name: str, engine_id: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
        """The params of one request of the concurrent flow: to prefill, to decode."""
        to_decode = {
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://127.0.0.1:{self.query_port}",
            "remote_engine_id": engine_id or self.engine_id(),
            "transfer_id": name,
        }
        return {**TO_PREFILL, "transfer_id": name}, to_decode

    def engine_id(self) -> str:
        """What a router learns at `GET /query`."""
        import httpx2 as httpx

        entries = httpx.get(f"http://127.0.0.1:{self.query_port}/query", timeout=10).json()
        return str(entries["0"]["engine_id"])

    def _all(
        self,
        label: str,
        total: int,
        at_once: int,
        begin: Callable[[int], None],
        go_on: Callable[[int], None],
    ) -> list[list[int]]:
        answers = []
        for first in range(0, total, at_once):
            numbers = range(first, min(first + at_once, total))
            for step in (begin, go_on):
                for number in numbers:
                    step(number)
            answers += [self.decode.answer(f"d{label}{number}")["tokens"] for number in numbers]
        return answers
