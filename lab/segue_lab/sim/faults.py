"""Faults of one node, and their times: at a time, or at the next effect of a kind after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from segue.engine.engine_api import SequenceResult, SequenceStep
from segue.kv.errors import InvalidRequest
from segue.kv.protocol.messages import Metadata
from segue.server.schedulers.prefill_result import decode_result
from segue.server.schedulers.scheduler import Scheduler
from segue_lab.sim.node_views import NodeView
from segue_lab.sim.vocabulary import SPOILED_METADATA
from segue_lab.sim.world import Injected


class NodeFaults:
    """The faults that wait on one node for their moment."""

    def __init__(self, node: NodeView) -> None:
        self.node = node
        #: name of an effect (or message) → what happens after the next one
        self.triggers: dict[str, list[Callable[[], None]]] = {}
        self.step_fails = 0
        self.sequence_fails = 0
        self._machine_armed = False
        #: how many of the next chunks that land here are hit by a bit flip before they are verified
        self.page_flips = 0
        #: how many of the next effects that ask something of a session, a path or the digester raise
        self.effect_fails = 0
        #: how many of the next events raise before the exchange has looked at them
        self.event_fails = 0
        #: how many of the next dials of a peer raise what they must not
        self.dial_fails = 0
        #: how the metadata that is sent next is spoiled: places in `SPOILED_METADATA`
        self.spoil_metadata: list[int] = []
        #: a method of the role has just raised, and nobody has looked yet at what the leader made of it
        self.broke = False
        #: how many of the next copies that are kept in host memory have one bit changed there
        self.copy_flips = 0
        #: the next checksums: the seconds that they take, or None: they fail
        self.digests: list[float | None] = []
        #: which rank carries out another order the next time
        self.diverges: int | None = None
        #: by how many seconds the next forward is longer
        self.slow_step_s = 0.0

    def arm(self, name: str, action: Callable[[], None]) -> None:
        """Run `action` right after the next effect called `name`."""
        self.triggers.setdefault(name, []).append(action)

    def reached(self, name: str, what: Any) -> None:
        """An effect was carried out."""
        waiting = self.triggers.pop(name, None)
        if waiting is not None:
            waiting.pop()()
            if waiting:
                self.triggers[name] = waiting

    # ---- the engine ----------------------------------------------------------------------------

    def forward_begins(
        self, steps: Sequence[SequenceStep]
    ) -> tuple[list[SequenceStep], list[SequenceResult]]:
        """The steps of a forward that are computed, and the results of the others; or the forward fails as a
        whole."""
        now = self.node.rng.random() < 0.5  # else when the KV is there, and has perhaps been sent
        if self.step_fails and now:
            self.step_fails -= 1
            raise Injected("the step failed")
        computed = list(steps)
        if not (self.sequence_fails and now):
            return computed, []
        self.sequence_fails -= 1
        refused = computed.pop(self.node.rng.randrange(len(computed)))
        return computed, [SequenceResult(refused.seq_id, error="this sequence failed at the door")]

    def forward_ends(self, results: list[SequenceResult]) -> list[SequenceResult]:
        """The results of a forward whose KV is stored; or it, or one of its sequences, fails even now."""
        if self.step_fails:
            self.step_fails -= 1
            raise Injected("the step failed at its end")
        if self.sequence_fails and results:
            self.sequence_fails -= 1
            at = self.node.rng.randrange(len(results))
            results[at] = SequenceResult(results[at].seq_id, error="this sequence failed")
        return results

    def fail_next_call(self, name: str) -> None:
        """The next call of this name breaks; `close` after it has done its work, or the engine would leak."""
        engine: Any = self.node.engine
        if name in vars(engine):
            return
        normal = getattr(engine, name)

        def broken(*args: Any) -> None:
            delattr(engine, name)
            self.node.state.counts[f"engine exception: {name}"] += 1
            if name == "close":
                normal(*args)
            raise Injected(f"injected into {name}")

        setattr(engine, name, broken)

    def fail_next_open(self) -> None:
        """The engine refuses the next sequence."""
        engine = self.node.engine
        normal = engine.open

        def refuse(*args: Any) -> None:
            engine.open = normal  # type: ignore[method-assign]
            raise InvalidRequest("the engine cannot serve this request")

        engine.open = refuse  # type: ignore[method-assign, assignment]

    # ---- the protocol --------------------------------------------------------------------------

    def fail_next_machine_step(self) -> None:
        """The next step of any machine of this node raises in its handler, which has done its work or not."""
        exchange: Any = getattr(self.node, "exchange", None)
        if exchange is None or self._machine_armed:
            return
        self._machine_armed = True
        normal = exchange.run

        def run(machine: Any, event: object) -> None:
            kind = type(machine)
            table, rows = kind.TABLE, kind.TABLE[machine.state]
            if type(event) not in rows:
                normal(machine, event)
                return
            exchange.run = normal
            self._machine_armed = False
            self.node.state.buggy.add(machine.transfer)
            handler, *afters = rows[type(event)]
            late = self.node.rng.random() < 0.5
            calls = iter((True,))

            def broken(machine: Any, given: object) -> Any:
                if not next(calls, False):
                    return handler(machine, given)
                if late:
                    handler(machine, given)
                raise RuntimeError("injected into a handler")

            kind.TABLE = {**table, machine.state: {**rows, type(event): (broken, *afters)}}
            try:
                normal(machine, event)
            finally:
                kind.TABLE = table

        exchange.run = run

    def metadata(self, metadata: Metadata) -> tuple[Metadata, bool]:
        """The metadata that is sent instead, and whether the session breaks right before it."""
        if not self.spoil_metadata:
            return metadata, False
        node, what = self.node, SPOILED_METADATA[self.spoil_metadata.pop(0)]
        node.state.counts[f"metadata: {what}"] += 1
        node.world.note(node.name, f"metadata of room {metadata.transfer.room:x} goes wrong: {what}")
        if what != "lost":
            node.state.spoiled[metadata.transfer.room, metadata.transfer.attempt] = what
        match what:
            case "first token":
                vocab_size = node.engine.info.vocab_size
                token = node.rng.choice((-1, vocab_size, 10**9))
                result = structs.replace(decode_result(metadata.content), first_token=token)
                return structs.replace(metadata, content=result.encode()), False
            case "content":
                return structs.replace(metadata, content=metadata.content[:-1]), False
            case "prompt tokens":
                return structs.replace(metadata, prompt_tokens=metadata.prompt_tokens + 1), False
            case _:
                return metadata, True

    def fail_next_item(self, item: str, late: bool) -> None:
        """The role raises the next time it is told `item`, before it has done anything or (`late`) after."""
        scheduler: Any = self.node.scheduler
        name = item if item in vars(Scheduler) or item in ("advance", "plan") else "on_change"
        normal = getattr(scheduler, name, None)
        if normal is None or name in vars(scheduler):
            return

        def broken(*args: Any, **more: Any) -> Any:
            if name != item and type(args[0]).__name__ != item:
                normal(*args, **more)
                return
            delattr(scheduler, name)
            self.node.state.counts[f"role exception: {item}"] += 1
            self.broke = name not in ("advance", "plan")
            if late:
                normal(*args, **more)
            raise Injected(f"injected into {item}")

        setattr(scheduler, name, broken)
