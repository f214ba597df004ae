"""The tables under any order of vLLM's calls and the worker's reports, in a model of EngineCore.

After each step no block of a hand-off that is not released has gone to another request, what is sent is the
prompt's KV, and none of EngineCore's asserts fires; at the end each request has ended once, every block is
free and every table is empty.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm_bench import (
    CONCURRENT_TO_DECODE,
    LOST,
    TO_PREFILL,
    decode_engine,
    prefill_engine,
    request,
    to_decode,
)
from vllm_model import BLOCK, ModelEngine

from segue.integrations.vllm.vllm_orders import BlocksReleased, HandoffEnded
from segue.integrations.vllm.vllm_settings import LoadFailurePolicy

INDEX = st.integers(0, 20)
TOKENS = st.integers(1, 24)


class EngineMachine(RuleBasedStateMachine):
    """What both roles have in common."""

    engine: ModelEngine

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def add(self, tokens: int, params: Any, prefix: int = 0, **more: Any) -> None:
        self.count += 1
        self.engine.add(request(f"r{self.count}", tokens, params, **more), prefix)

    @rule(budget=st.integers(1, 20))
    def schedule(self, budget: int) -> None:
        if len(self.engine.steps) < self.engine.depth:
            self.engine.schedule(budget)

    @precondition(lambda self: self.engine.steps)
    @rule()
    def complete(self) -> None:
        self.engine.complete()

    @precondition(lambda self: self.engine.steps)
    @rule(index=INDEX, again=st.booleans())
    def lie(self, index: int, again: bool) -> None:
        """The worker names requests that nobody waits for or whose hand-off has not ended, and repeats what
        it said of a released hand-off."""
        worker = self.engine.worker
        old = worker.released[index % len(worker.released)] if again and worker.released else None
        reports = [] if old is None else [HandoffEnded(old), BlocksReleased(old)]
        self.engine.complete(f"r{index}", "unknown", lies=reports)

    @precondition(lambda self: self.engine.requests)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        names = list(self.engine.requests)
        self.engine.abort(names[index % len(names)])

    @precondition(lambda self: self.engine.worker.handoffs)
    @rule(index=INDEX, fails=st.booleans(), released=st.booleans())
    def end(self, index: int, fails: bool, released: bool) -> None:
        worker = self.engine.worker
        number = list(worker.handoffs)[index % len(worker.handoffs)]
        if not worker.handoffs[number].ended:
            worker.end(number, LOST if fails or worker.handoffs[number].aborted else None)
        if released:
            worker.release(number)

    @invariant()
    def nothing_is_given_away(self) -> None:
        if self.count:
            self.engine.check()

    def teardown(self) -> None:
        if self.count:
            self.engine.quiet()
            assert len(self.engine.ends) == self.count


class PrefillMachine(EngineMachine):
    @initialize(depth=st.integers(1, 2), blocks=st.integers(6, 16))
    def begin(self, depth: int, blocks: int) -> None:
        self.engine = prefill_engine(blocks, depth)

    @rule(tokens=TOKENS, sequential=st.booleans(), max_tokens=st.sampled_from([1, 1, 1, 2]))
    def arrive(self, tokens: int, sequential: bool, max_tokens: int) -> None:
        params = dict(TO_PREFILL) if sequential else TO_PREFILL | {"transfer_id": f"t{self.count}"}
        self.add(tokens, params, max_tokens=max_tokens)

    @rule(tokens=TOKENS, wrong=st.booleans())
    def arrive_without(self, tokens: int, wrong: bool) -> None:
        self.add(tokens, {"do_remote_decode": 7} if wrong else None)


class DecodeMachine(EngineMachine):
    @initialize(
        depth=st.integers(1, 2),
        blocks=st.integers(6, 16),
        policy=st.sampled_from(list(LoadFailurePolicy)),
        fails_first=st.booleans(),
    )
    def begin(self, depth: int, blocks: int, policy: LoadFailurePolicy, fails_first: bool) -> None:
        self.engine = decode_engine(blocks, policy, depth)
        self.engine.fails_first = fails_first

    @rule(tokens=TOKENS, sequential=st.booleans(), prefix=st.integers(0, 3))
    def arrive(self, tokens: int, sequential: bool, prefix: int) -> None:
        cached = min(prefix, (tokens - 1) // BLOCK) * BLOCK
        self.add(tokens, to_decode(tokens) if sequential else dict(CONCURRENT_TO_DECODE), cached)

    @rule(tokens=TOKENS, wrong=st.booleans())
    def arrive_without(self, tokens: int, wrong: bool) -> None:
        self.add(tokens, {"do_remote_prefill": True} if wrong else None)

    @precondition(lambda self: self.engine.worker.handoffs)
    @rule(index=INDEX)
    def write_late(self, index: int) -> None:
        """A peer writes although the hand-off has failed: legal until the release."""
        worker = self.engine.worker
        worker.write(worker.handoffs[list(worker.handoffs)[index % len(worker.handoffs)]])


TestPrefillTable = PrefillMachine.TestCase
TestDecodeTable = DecodeMachine.TestCase
TestPrefillTable.settings = TestDecodeTable.settings = settings(max_examples=150, stateful_step_count=40)
