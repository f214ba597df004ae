"""The rules of what ranks write, read and pass on: nothing of a hand-off that is over, and each byte once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.kv.ids import KVPoll, LeaderId, Role, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Destination
from segue_lab.sim.node_views import KVView
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Violation


@dataclass(slots=True)
class Half:
    """The effects of one node about one hand-off."""

    node: KVView
    opened_at: float
    phase: KVPoll | None = None
    ended_at: float | None = None
    #: the session to the peer was up when it ended
    connected: bool = False
    quarantined: bool = False
    released_at: float | None = None
    #: the transport has answered its fence
    fenced: bool = False
    epoch: int = 0
    pages: tuple[int, ...] = ()


class RankChecks:
    """See the module's text. `halves` and `reads` are those of `Checks`."""

    def __init__(
        self,
        state: SimState,
        halves: Mapping[tuple[LeaderId, TransferId], Half],
        reads: Mapping[tuple[LeaderId, LeaderId, int], TransferId],
    ) -> None:
        self._halves = halves
        self._reads = reads
        self._scenario = state.scenario
        self._counts = state.counts
        #: by hand-off: the bytes that decode asked for, and those that prefill's ranks were told to write
        self._wanted: dict[TransferId, int] = {}
        self._written: dict[TransferId, int] = {}

    def published(self, node: KVView, message: Destination) -> None:
        """Decode says where to write."""
        tokens = message.prompt_tokens - message.prefix_tokens
        shape = node.engine.spec.shape
        self._wanted[message.transfer] = tokens * shape.token_bytes + shape.state_bytes

    def posted(self, node: KVView, effect: events.PostWrite) -> None:
        """A rank of prefill is told to write."""
        nbytes = sum(block.nbytes for block in effect.blocks)
        self._written[effect.transfer] = self._written.get(effect.transfer, 0) + nbytes

    def succeeded(self, node: KVView, transfer: TransferId) -> None:
        """5 and 9: every byte has crossed the wire, and none of them twice."""
        wanted, written = self._wanted.get(transfer, 0), self._written.get(transfer, 0)
        if wanted != written:
            text = f"{transfer}: {written} bytes crossed the wire, {wanted} are what decode did not have"
            raise Violation("9", text, (transfer.room,))
        splits = self._scenario.splits
        prefill, decode = splits.prefill, splits.decode
        if self._scenario.state:
            self._counts["with a state"] += 1
        if prefill != decode:
            self._counts["between unequal sides"] += 1
        if prefill.cp > 1:
            self._counts["with context parallelism"] += 1
        if prefill.tp > splits.heads:
            self._counts["with replicas at prefill"] += 1

    def released(self, node: KVView, transfer: TransferId, epoch: int) -> None:
        """4: decode's ranks write nothing of it to one another any more."""
        if (
            node.spec.role is Role.DECODE
            and epoch
            and any(p.busy_with(epoch) for p in node.paths_to(node.me))
        ):
            raise Violation(
                "4", f"{node.name} releases {transfer} while its ranks pass it on", (transfer.room,)
            )

    def drained(self, node: KVView, transfer: TransferId) -> None:
        """4: the word that no write starts any more must be true."""
        half = self._halves.get((node.me, transfer))
        epoch = half.epoch if half is not None else 0
        if epoch and any(path.busy_with(epoch) for path in node.paths_to(transfer.decode)):
            raise Violation(
                "4",
                f"{node.name} says that nothing of {transfer} is written while a write runs",
                (transfer.room,),
            )

    def reading(self, node: KVView, peer: LeaderId, epoch: int, pages: set[int]) -> None:
        """3: what the transport reads is still the hand-off's own."""
        if node.spec.role is Role.DECODE:
            exposed = node.exposed.get(epoch)
            if exposed is None or not pages <= exposed.pages:
                raise Violation("3", f"{node.name} passes on pages of epoch {epoch:x} that it has given up")
            return
        transfer = self._reads.get((node.me, peer, epoch))
        if transfer is None:
            raise Violation("3", f"{node.name} sends pages of epoch {epoch:x} that it has given up")
        if not pages <= node.owned(transfer.sent_as):
            raise Violation("3", f"{node.name} reads pages that {transfer} does not own", (transfer.room,))

    def hashing(self, node: KVView, transfer: TransferId, pages: set[int]) -> None:
        """3: what is hashed still belongs to its hand-off, on either side."""
        half = self._halves.get((node.me, transfer))
        if half is None:
            raise Violation(
                "1", f"{node.name} hashes for {transfer}, which it never opened", (transfer.room,)
            )
        if node.spec.role is Role.PREFILL:
            self.reading(node, transfer.decode, half.epoch, pages)
            return
        exposed = node.exposed.get(half.epoch)
        if half.released_at is not None or exposed is None or not pages <= exposed.pages:
            raise Violation(
                "3", f"{node.name} verifies pages of {transfer} that it has given up", (transfer.room,)
            )
