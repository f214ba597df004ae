"""A deployment of real models in one process, behind the real HTTP server, whose instances can be killed.

Killed means: every session of the instance ends, it can be reached no more, and what it still says is lost.
`kill_at` does it on the instance's own thread, in the middle of a step. (`tests/e2e` kills processes.)
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
from deployment import LIMITS, Running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from segue.cli.commands.frontend import followed
from segue.engine.engine_api import SequenceResult, StepHandle
from segue.kv.errors import PeerLost
from segue.kv.ids import LeaderId, Role
from segue.kv.io import IoThread
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.frontend.app import OpenAIServer, OpenAIServerSettings, build_app
from segue.server.frontend.http_server import HttpServer, bind
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.trace_context import passed_on
from segue.server.messages.records import Records
from segue.server.observe.metrics import Metrics
from segue.server.observe.traces import Traces
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_server import serve as serve_registry

NAME = "tiny"


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Single bytes of printable ASCII and a few words; `</s>` is the end."""
    alphabet = [chr(c) for c in range(33, 127) if chr(c) not in "^`~"]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for letter in ["Ġ", "Ċ", *alphabet]:
        if len(vocab) < vocab_size:
            vocab[letter] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", bos_token="<s>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    )
    tokenizer.save_pretrained(folder)


class Steps:
    """Counts the steps of an engine, and acts in the middle of one."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.count = 0
        self.at: int | None = None
        self.act: Callable[[], None] = lambda: None
        self._collect = running.engine.collect
        running.instance.leader.engine = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.running.engine, name)

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        results = self._collect(handle)
        self.count += 1
        if self.at is not None and self.count >= self.at:
            self.at = None
            self.act()
        return results


class Cluster:
    """Registry, instances and a door over HTTP, each part with its own thread."""

    def __init__(
        self, roles: Sequence[Role], tokenizer: Path, spans: Traces | None = None, **options: Any
    ) -> None:
        self.spans = spans
        self.io = IoThread()
        self.io.start()
        self.limits = LIMITS.limits()
        self.metrics = Metrics()
        self._options = options
        self.registry = self.io.call(serve_registry("127.0.0.1", 0, secret=None, limits=self.limits), 60)
        self.url = f"http://127.0.0.1:{self.registry.port}"
        self.running: list[Running] = []
        self.steps: dict[LeaderId, Steps] = {}
        for role in roles:
            self.add(role)
        self._backend = self.io.call(self._open(tokenizer), 60)
        self.http = httpx.Client(base_url=self._backend, timeout=60)

    def add(self, role: Role) -> Running:
        """One more instance."""
        running = Running(role, self.url, **self._options)
        self.running.append(running)
        self.steps[running.instance.me] = Steps(running)
        if self.spans is not None:
            running.instance.scheduler.admission.records.on_record = self.spans.on_record
        return running

    async def _open(self, tokenizer: Path) -> str:
        spans = self.spans
        records = Records(on_record=None if spans is None else spans.on_record)
        self.client = RegistryClient(self.url, secret=None, limits=self.limits)
        self.fleet = Fleet(
            self.client,
            FleetSettings(served_model=self.running[0].instance.config.served_model, policy="round_robin"),
            secret=None,
            limits=self.limits,
            metrics=self.metrics,
            records=records,
            span_below=None if spans is None else spans.below,
        )
        self.door = OpenAIServer(
            self.fleet,
            ModelTokenizer.load(tokenizer),
            OpenAIServerSettings(model=NAME, context_tokens=512, vocab_size=97, limits=self.limits),
            self.metrics,
            records,
            passed_on if spans is None else partial(followed, spans),
        )
        sock = bind("127.0.0.1", 0)
        self.server = HttpServer(build_app(self.door), sock, drain_s=2)
        self.server.start()
        self.fleet.start()
        host, port = self.server.address
        return f"http://{host}:{port}"

    async def _shut(self) -> None:
        await self.fleet.close()
        await self.client.aclose()
        await self.server.stop()
        self.door.close()

    # ---- what tests do --------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], within_s: float = 60) -> None:
        """Wait until the frontend's view of the fleet satisfies `condition`."""

        async def wait() -> None:
            async with asyncio.timeout(within_s):
                while not condition():
                    await self.fleet.changed()

        self.io.call(wait(), within_s + 5)

    def seen(self, count: int, role: Role) -> None:
        """Wait until the frontend may place on `count` instances of `role`."""
        self.until(lambda: len(self.fleet.router.usable(role)) == count)

    def by_role(self, role: Role) -> list[Running]:
        return [r for r in self.running if r.instance.config.role is role]

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def counted(self, name: str, value: float, **labels: str) -> None:
        """Wait until a counter has this value: a request is counted after its client has its answer."""
        until = time.monotonic() + 60
        while (found := self.metric(name, **labels)) < value and time.monotonic() < until:
            time.sleep(0.001)
        assert found == value

    @property
    def replaced(self) -> float:
        """Requests that outlived a worker, before and after their first token."""
        names = ("segue_continuations_total", "segue_retries_total")
        return sum(self.metric(name, code="PEER_LOST") for name in names)

    def kill(self, running: Running) -> None:
        """End all its sessions at once, and let nobody in any more."""
        plane = running.instance.plane
        done = threading.Event()

        async def cut() -> None:
            await plane.node.close(PeerLost("it was killed"))
            done.set()

        tasks: list[asyncio.Task[None]] = []
        plane.io.post(lambda: tasks.append(asyncio.ensure_future(cut())))
        assert done.wait(60)

    def cut(self, running: Running) -> None:
        """Cut the sockets of its sessions without a word; it lives, and others come back to it."""
        plane = running.instance.plane
        done = threading.Event()

        def snap() -> None:
            for session in list(plane.sessions.values()):
                session.wire.abort()
            done.set()

        plane.io.post(snap)
        assert done.wait(60)

    def kill_at(self, running: Running, step: int) -> None:
        """Kill it in its `step`-th step from now."""
        steps = self.steps[running.instance.me]
        steps.act = lambda: self.kill(running)
        steps.at = steps.count + step

    def leave(self, running: Running) -> None:
        """Act as the registry after the last keep-alive, and remove the rest of the dead instance."""
        self.running.remove(running)
        running.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, content=json.dumps({"model": NAME, **body}))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream; it must end properly."""
        content = json.dumps({"model": NAME, "stream": True, **body})
        with self.http.stream("POST", path, content=content) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        found = [line.removeprefix("data: ") for line in lines]
        assert found.pop() == "[DONE]"
        return [json.loads(event) for event in found]

    def close(self) -> None:
        self.http.close()
        self.io.call(self._shut(), 60)
        for running in self.running:
            running.close()
        self.io.call(self.registry.close(), 60)
        self.io.stop()


@contextmanager
def cluster(tokenizer: Path, *roles: Role, **options: Any) -> Iterator[Cluster]:
    made = Cluster(roles, tokenizer, **options)
    try:
        for role in set(roles):
            made.seen(roles.count(role), role)
        yield made
    finally:
        made.close()
