"""Managers with real sessions and transports, and one hand-off between two of them, for tests."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from segue.kv.agent.kv_agent import KVAgent
from segue.kv.config import HOST, KVConfig
from segue.kv.errors import ErrorCode, SegueError
from segue.kv.handles import Change, KVReceiver, KVSender
from segue.kv.ids import KVPoll, Role, Span, TransferId, new_room
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.protocol import events
from segue.kv.transport.memory.pool_memory import Memory, allocate

SHAPE = KVShape(layers=3, kv_heads=2, k_dim=8, v_dim=8, dtype="float16", item_bytes=2)
PAGES, PAGE = 16, 4
Answer = TypeVar("Answer")
#: When a test is given up, and what a hand-off has that is to succeed.
DEADLINE_S = 60.0
#: Nobody is given up for a thread or a process that does not get a turn for a while.
LIMITS = Limits(keepalive_s=0.5, peer_silence_s=DEADLINE_S, handshake_s=DEADLINE_S, connect_s=DEADLINE_S)


def spec(page_tokens: int = PAGE, shape: KVShape = SHAPE) -> PoolSpec:
    return PoolSpec(
        shape=shape, page_tokens=page_tokens, pages=PAGES, layer_count=shape.layers, head_count=shape.kv_heads
    )


class Side:
    """A manager, its memory and what it reported. `options` are fields of its `KVConfig`, its `memory` and
    the `runtime` that it is made with."""

    def __init__(self, role: Role, *, transport: str = "shm", **options: Any) -> None:
        self.spec: PoolSpec = options.pop("spec", None) or spec()
        self.memory: Memory = options.pop("memory", None) or allocate(self.spec.nbytes)
        self.changes: queue.Queue[Change] = queue.Queue()
        #: losses of ranks that the owner of the manager was told
        self.lost: queue.Queue[SegueError] = queue.Queue()
        made_with = {name: options.pop(name) for name in ("runtime", "environment") if name in options}
        options = {"model": "m/float32", "limits": LIMITS, "transports": [transport], **options}
        config = KVConfig(role=role, spec=self.spec, **options)
        self.me = config.me
        self.manager: Any = self.managed(config, **made_with)

    def managed(self, config: KVConfig, **made_with: Any) -> Any:
        runtime = made_with.get("runtime", HOST)
        pool = self.memory
        return KVManager(config, pool, self.changes.put, on_rank_lost=self.lost.put, runtime=runtime)

    def wait(self, handle: KVSender | KVReceiver, phase: KVPoll) -> None:
        while (now := handle.poll()) is not phase:
            assert not now.terminal, handle.error
            self.changes.get(timeout=DEADLINE_S)

    def next(self, kind: type[Any]) -> Any:
        """The next change of this kind; those before it are passed over."""
        while True:
            change = self.changes.get(timeout=DEADLINE_S)
            if isinstance(change, kind):
                return change

    def wait_release(self, transfer: TransferId) -> None:
        while self.next(events.Release).key != transfer.received_as:
            pass

    def sizes(self) -> dict[str, int]:
        """After everything that the manager has been given."""
        return ask(self, self.manager.sizes)

    def close(self) -> None:
        self.manager.close()
        self.memory.close()


class AgentSide(Side):
    """As `Side`, with the manager in an agent."""

    def managed(self, config: KVConfig, **made_with: Any) -> KVAgent:
        return KVAgent(config, self.memory, self.changes.put, on_rank_lost=self.lost.put, **made_with)

    def sizes(self) -> dict[str, int]:
        assert self.manager.problems() == []
        sizes: dict[str, int] = self.manager.sizes()
        return sizes


@contextmanager
def joined(prefill: Any, *decodes: Any) -> Iterator[None]:
    """Start these sides; each decode is told where prefill is."""
    with ExitStack() as stack:
        for side in (prefill, *decodes):
            stack.callback(side.close)
        where = prefill.manager.start()
        for decode in decodes:
            decode.manager.start()
            decode.manager.add_peer(prefill.me, *where)
        yield


@contextmanager
def sides(
    transport: str = "shm",
    *,
    prefill: Mapping[str, Any] = MappingProxyType({}),
    decode: Mapping[str, Any] = MappingProxyType({}),
    **both: Any,
) -> Iterator[tuple[Side, Side]]:
    """A prefill and a decode side that know each other, with options of either and of both."""
    made = Side(Role.PREFILL, **{"transport": transport, **both, **prefill})
    other = Side(Role.DECODE, **{"transport": transport, **both, **decode})
    with joined(made, other):
        yield made, other


def expect(manager: KVManager, transfer: TransferId, tokens: int, budget_s: float) -> KVSender:
    """Prefill's half of this hand-off, placed for its decode leader."""
    placed = {"decode": transfer.decode, "attempt": transfer.attempt}
    return manager.expect(transfer.sent_as, tokens, budget_s, **placed)


def receive(manager: KVManager, transfer: TransferId, tokens: int, budget_s: float) -> KVReceiver:
    """Decode's half of this hand-off."""
    return manager.receive(transfer.received_as, transfer.prefill, tokens, budget_s)


def begin(
    prefill: Side, decode: Side, tokens: int, budget_s: float = DEADLINE_S
) -> tuple[TransferId, KVSender, KVReceiver]:
    """A hand-off whose decode half waits for pages; prefill's half has `budget_s`."""
    transfer = TransferId(new_room(), 0, prefill.me, decode.me)
    sender = expect(prefill.manager, transfer, tokens, budget_s)
    receiver = receive(decode.manager, transfer, tokens, DEADLINE_S)
    decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
    return transfer, sender, receiver


def published(
    prefill: Side, decode: Side, tokens: int, first_page: int = 0, prefix: int = 0
) -> tuple[TransferId, KVSender, KVReceiver]:
    """A hand-off whose destination, in pages from `first_page` on, prefill knows."""
    transfer, sender, receiver = begin(prefill, decode, tokens)
    size = decode.spec.page_tokens
    receiver.publish(range(first_page, first_page + -(-tokens // size) - prefix // size), prefix)
    prefill.wait(sender, KVPoll.WAITING_FOR_INPUT)
    return transfer, sender, receiver


def assert_succeeds(halves: Mapping[Any, KVSender | KVReceiver]) -> None:
    """The half of each side succeeds; then it is dropped."""
    for side, handle in halves.items():
        side.wait(handle, KVPoll.SUCCESS)
        handle.clear()


def assert_fails(code: ErrorCode, text: str, halves: Mapping[Any, KVSender | KVReceiver]) -> None:
    """The half of each side fails with `code` and `text`, its pages come back, and nothing is left."""
    for side, handle in halves.items():
        while not handle.released:
            side.changes.get(timeout=DEADLINE_S)
        assert handle.poll() is KVPoll.FAILED
        assert handle.error is not None
        assert handle.error.code is code
        assert text in handle.error.text
        handle.clear()
    for side in halves:
        assert_at_rest(side)


def assert_handed_over(prefill: Side, decode: Side, tokens: int, chunk: int, prefix: int = 0) -> None:
    """One hand-off from pages 0 … of prefill into pages 2 … of decode; the bytes must be equal."""
    pattern = os.urandom(prefill.spec.nbytes)
    prefill.memory.buffer[: len(pattern)] = pattern
    _transfer, sender, receiver = published(prefill, decode, tokens, 2, prefix)
    for start in range(0, tokens, chunk):
        end = min(tokens, start + chunk)
        last = b"7" if end == tokens else None
        sender.send(Span(start, end), range(PAGES), last)
    decode.wait(receiver, KVPoll.SUCCESS)
    prefill.wait(sender, KVPoll.SUCCESS)
    assert receiver.metadata == b"7"
    page = decode.spec.page_tokens
    for token in range(prefix, tokens):
        slot = 2 * page + token - prefix // page * page
        for layer in range(3):
            for value in (False, True):
                a, b = prefill.spec.offset(layer, value, token), decode.spec.offset(layer, value, slot)
                size = prefill.spec.k_token_bytes
                assert prefill.memory.buffer[a : a + size] == decode.memory.buffer[b : b + size]
    sender.clear()
    receiver.clear()


def ask(side: Side, question: Callable[[], Answer]) -> Answer:
    """Asked on the I/O thread, after everything it has been given."""
    answers: queue.Queue[Answer] = queue.Queue()
    side.manager.io.post(lambda: answers.put(question()))
    return answers.get(timeout=DEADLINE_S)


def assert_at_rest(side: Side) -> None:
    """Nothing is held any more, once an agent has heard the last word."""
    until = time.monotonic() + (DEADLINE_S if isinstance(side, AgentSide) else 0.0)
    while left := {k: v for k, v in side.sizes().items() if v and k not in ("peers", "ended", "deadlines")}:
        assert time.monotonic() < until, left
