"""Bit flips: their places, the hand-offs that they hit, and the required outcome.

One bit changes on the wire (in a slice that lands), or in a page of the destination after it has landed
and before it has been verified. A hand-off that was hit in bytes that it hands over must never be
decoded; one that was hit elsewhere, or not at all, must not fail for its checksum. At most one flip per
hand-off, since a second one could undo the first.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from segue.kv.errors import ErrorCode, ErrorInfo
from segue.kv.ids import KVPoll, Role, TransferId
from segue.kv.protocol import events
from segue_lab.sim.node_views import KVView
from segue_lab.sim.world import Violation


class BitFlips:
    """The ledger of one deployment."""

    def __init__(self, counts: Counter[str], spoiled: set[TransferId]) -> None:
        self._counts = counts
        #: hand-offs of which a byte that matters is wrong
        self.spoiled = spoiled

    # ---- places --------------------------------------------------------------------------------

    def wire(
        self, node: KVView, epoch: int, data: list[tuple[int, bytes]], rng: random.Random
    ) -> list[tuple[int, bytes]]:
        """`data` as it lands on `node` under `epoch`, with one bit changed."""
        exposed = node.exposed.get(epoch)
        if exposed is None or exposed.transfer in self.spoiled:
            return data
        self.spoiled.add(exposed.transfer)
        index = rng.randrange(len(data))
        to, chunk = data[index]
        wrong = bytearray(chunk)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        return [*data[:index], (to, bytes(wrong)), *data[index + 1 :]]

    def page(self, node: KVView, effect: events.ComputeChecksum, rng: random.Random) -> None:
        """One bit changes among the landed bytes that `effect` is about to read; or, sometimes, in the
        unused rest of the prompt's last page, which nobody reads."""
        if effect.transfer in self.spoiled:
            return
        spec, content = node.engine.spec, effect.content
        if content.state is not None and rng.random() < 0.5:
            self.spoiled.add(effect.transfer)
            at, nbytes = content.state
            node.engine.memory[at + rng.randrange(nbytes)] ^= 1 << rng.randrange(8)
            return
        slot, tokens = content.runs[-1]
        plane = content.planes[rng.randrange(len(content.planes))]
        end = slot + tokens
        if end == self._prompt_end(node, effect) and end % spec.page_tokens and rng.random() < 0.3:
            self._counts["flips beside"] += 1
            at = plane.at(end, spec.page_tokens)
        else:
            self.spoiled.add(effect.transfer)
            slot, tokens = content.runs[rng.randrange(len(content.runs))]
            at = plane.at(slot + rng.randrange(tokens), spec.page_tokens)
        node.engine.memory[at + rng.randrange(plane.row_bytes)] ^= 1 << rng.randrange(8)

    def _prompt_end(self, node: KVView, effect: events.ComputeChecksum) -> int:
        """The slot behind the prompt's last token. The bytes of one rank of several may end before it; the
        next token of its last page then comes from another rank."""
        machine: Any = node.exchange.machines[effect.transfer]
        page_tokens = node.engine.spec.page_tokens
        return int(machine.pages[-1] * page_tokens + (machine.prompt_tokens - 1) % page_tokens + 1)

    # ---- what must come of it ------------------------------------------------------------------

    def ended(self, node: KVView, effect: events.HandoffPhase) -> None:
        """5: nothing is decoded from a flipped hand-off; and no checksum is wrong without a flip."""
        transfer, error = effect.transfer, effect.error
        if effect.phase is KVPoll.SUCCESS and node.spec.role is Role.DECODE and transfer in self.spoiled:
            raise Violation("5", f"{node.name} commits {transfer}, of which a bit is wrong", (transfer.room,))
        if error is not None and error.code is ErrorCode.CHECKSUM_MISMATCH:
            self._mismatch(node, error, transfer)

    def _mismatch(self, node: KVView, error: ErrorInfo, transfer: TransferId) -> None:
        if all(spoiled.sent_as != transfer.sent_as for spoiled in self.spoiled):
            raise Violation("12", f"{transfer}: {error.text}, but no bit was wrong", (transfer.room,))
        self._counts["mismatches"] += 1
        if not error.retryable or error.room != transfer.room:
            raise Violation("25", f"{transfer}: {error}", (transfer.room,))
