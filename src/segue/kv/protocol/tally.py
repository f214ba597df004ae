"""Reports as sets that are compared with the plan, never as counts: `Tally` of the chunks that have arrived
at the receiver, `Fences` of the answers when an epoch ends.

Each planned (source, target) pair must report chunks that cover `[prefix, prompt)` without a gap or an
overlap and end with its final marker; the chunks of all pairs must be the same ones, since each source sends
its share of each (`PairPlan.share`); what landed must have the checksum of what was sent, also where a
target has passed it on to another rank; and the metadata of this very transfer must be here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from segue.kv.errors import ChecksumMismatch, MetadataMismatch, TransferFailed
from segue.kv.ids import LeaderId, RankId, Span, TransferId
from segue.kv.layout.planner import PairPlan
from segue.kv.protocol.messages import ChunkPosted, Metadata


class Tally:
    """The arrived parts of one hand-off. `pending` holds the (source rank, target rank) of which not all has:
    at first those of all pairs and relays of the plan. `unverified` has the chunks whose bytes are being
    read, by rank and tag of their `ComputeChecksum`; `relaying` those that a rank passes on, each with the
    rank that it goes to, by rank and tag of their `Relay`."""

    __slots__ = (
        "_chunks",
        "_end",
        "_next_tag",
        "_plan",
        "_relayed",
        "_spans",
        "_start",
        "_transfer",
        "metadata",
        "pending",
        "relaying",
        "unverified",
    )

    def __init__(self, transfer: TransferId, plan: PairPlan, prefix_tokens: int, prompt_tokens: int) -> None:
        self._transfer = transfer
        self._plan = plan
        self._start = prefix_tokens
        self._end = prompt_tokens
        self._chunks: dict[tuple[int, int], list[ChunkPosted]] = {pair: [] for pair in plan.pairs}
        #: by relay: the numbers of the chunks that have come to its end
        self._relayed: dict[tuple[int, int], set[int]] = {(s, other): set() for s, _, other in plan.relays}
        #: the chunks, as the first pair has reported them
        self._spans: list[Span] = []
        self.pending = {*self._chunks, *self._relayed}
        self.unverified: dict[tuple[int, int], ChunkPosted] = {}
        self.relaying: dict[tuple[int, int], tuple[ChunkPosted, int]] = {}
        self._next_tag = 0
        self.metadata: Metadata | None = None

    @property
    def complete(self) -> bool:
        """Every planned pair and relay has covered every token, every checksum was right, the metadata is
        here."""
        return not self.pending and not self.unverified and self.metadata is not None

    @property
    def last_wire_s(self) -> float:
        """The time of the transport for the slowest of the pairs' last chunks, in seconds."""
        return max((seen[-1].wire_s for seen in self._chunks.values() if seen), default=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that have landed, once for each pair that sent them."""
        return sum(chunk.nbytes for seen in self._chunks.values() for chunk in seen)

    def chunk(self, message: ChunkPosted) -> bool:
        """Note a landed chunk; False if it is an exact repeat. Raises TransferFailed when it is not
        the next chunk of a planned pair."""
        pair = (message.source, message.target)
        seen = self._chunks.get(pair)
        if seen is None:
            raise TransferFailed(f"chunk from rank {pair[0]} to rank {pair[1]}, which the plan does not have")
        if 0 <= message.sequence < len(seen) and seen[message.sequence] == message:
            return False
        token = seen[-1].span.end if seen else self._start
        problem = self._problem(message, pair, len(seen), token)
        if problem:
            raise TransferFailed(f"ranks {pair[0]} to {pair[1]}: {problem}")
        seen.append(message)
        if len(seen) > len(self._spans):
            self._spans.append(message.span)
        if message.final:
            self.pending.discard(pair)
        return True

    def share(self, message: ChunkPosted) -> Span:
        """The tokens of a chunk that its source has sent."""
        return self._plan.share(message.source, message.span)

    def relay(self, message: ChunkPosted, other: int) -> int:
        """A landed chunk is being relayed to the rank `other`; returns the tag of the relay."""
        self._next_tag += 1
        self.relaying[message.target, self._next_tag] = (message, other)
        return self._next_tag

    def relayed(self, message: ChunkPosted, other: int) -> None:
        """A chunk that was passed on has come to its end, and was right."""
        relay = (message.source, other)
        self._relayed[relay].add(message.sequence)
        seen = self._chunks[message.source, message.target]
        if seen[-1].final and self._relayed[relay] == {chunk.sequence for chunk in seen}:
            self.pending.discard(relay)

    def verify(self, message: ChunkPosted, rank: int) -> int:
        """This chunk's bytes at `rank` are being hashed; returns the tag of the answer."""
        self._next_tag += 1
        self.unverified[rank, self._next_tag] = message
        return self._next_tag

    def check(self, message: ChunkPosted, rank: int, checksum: int) -> None:
        """Compare what landed at `rank` with what was sent. Raises ChecksumMismatch with all there is to
        say."""
        if checksum != message.checksum:
            via = f" by {message.target}" if rank != message.target else ""
            raise ChecksumMismatch(
                f"room {self._transfer.room}, chunk {message.sequence} (tokens {message.span.start} to "
                f"{message.span.end}, ranks {message.source} to {rank}{via}): what landed has the "
                f"checksum {checksum:016x}, what was sent {message.checksum:016x}"
            )

    def _problem(self, message: ChunkPosted, pair: tuple[int, int], sequence: int, token: int) -> str:
        """Why `message` is not chunk number `sequence`, beginning at `token`; empty if it is."""
        span = message.span
        if pair not in self.pending:
            return f"chunk {message.sequence} came after the final one"
        if message.sequence != sequence:
            return f"chunk {message.sequence} came where chunk {sequence} was due"
        if span.start != token:
            return f"chunk covers tokens from {span.start} where {token} was due"
        if span.end > self._end:
            return f"chunk ends at token {span.end}, after the prompt's end {self._end}"
        if message.final != (span.end == self._end):
            return f"chunk ends at token {span.end} of {self._end} with final={message.final}"
        if len(span) == 0 and not message.final:
            return f"chunk {sequence} is empty"
        if message.every < 1:
            return f"checksum over one layer in {message.every}"
        if sequence < len(self._spans) and span != self._spans[sequence]:
            known = self._spans[sequence]
            covers = f"chunk {sequence} covers tokens {span.start} to {span.end}"
            return f"{covers}, for other ranks {known.start} to {known.end}"
        tokens = len(self.share(message))
        nbytes = self._plan.chunk_bytes(*pair, tokens, message.final)
        if message.nbytes != nbytes:
            return f"chunk of {tokens} tokens moved {message.nbytes} bytes where {nbytes} were planned"
        return ""

    def note_metadata(self, metadata: Metadata) -> bool:
        """Note the metadata; False if it is an exact repeat. Raises MetadataMismatch when it belongs
        to another transfer, another prompt, or differs from what came before."""
        if metadata.transfer != self._transfer:
            raise MetadataMismatch(f"metadata of {metadata.transfer} came for {self._transfer}")
        if metadata.prompt_tokens != self._end:
            raise MetadataMismatch(
                f"metadata is for a prompt of {metadata.prompt_tokens} tokens, ours has {self._end}"
            )
        if self.metadata is None:
            self.metadata = metadata
            return True
        if self.metadata != metadata:
            raise MetadataMismatch("a second metadata message differs from the first")
        return False

    def missing(self) -> str:
        """The parts that have not arrived, for an error's text."""
        parts = [f"ranks {s} to {t}" for s, t in sorted(self.pending)]
        if self.metadata is None:
            parts.append("the metadata")
        parts += [f"the verification of chunk {m.sequence}" for m in self.unverified.values()]
        return ", ".join(parts)


class Fences:
    """The answers of our ranks to the fences of one hand-off, in any order: of each rank one for every
    partner, a rank that it exchanges bytes with. `waiting` holds the (rank, partner) without an answer,
    `unproven` those with a rank of the `peer` of which no answer was a proof (see `FenceDone`). Ranks of our
    own that write to one another are both fenced: that both have answered is the proof.

    A fence that is asked again keeps what was answered: a proof stays one, whenever it comes.
    """

    __slots__ = ("unproven", "waiting")

    def __init__(self, partners: Mapping[int, Collection[RankId]], peer: LeaderId) -> None:
        self.waiting = {(rank, partner) for rank, others in partners.items() for partner in others}
        self.unproven = {(rank, partner) for rank, partner in self.waiting if partner.leader == peer}

    def answer(self, rank: int, partner: RankId, proven: bool) -> bool:
        """Note an answer; False for one that is no news: to what was not asked, or said so before."""
        asked = (rank, partner)
        news = asked in self.waiting or (proven and asked in self.unproven)
        self.waiting.discard(asked)
        if proven:
            self.unproven.discard(asked)
        return news


def expected_pages(prompt_tokens: int, prefix_tokens: int, page_tokens: int) -> int:
    """How many pages hold tokens `[prefix // page * page, prompt)`."""
    return -(-prompt_tokens // page_tokens) - prefix_tokens // page_tokens


def page_problem(pages: Sequence[int], prompt_tokens: int, prefix_tokens: int, plan: PairPlan) -> str:
    """Why `pages` cannot be the destination of this hand-off; an empty string if they can."""
    if not 0 <= prefix_tokens <= prompt_tokens:
        return f"prefix of {prefix_tokens} tokens for a prompt of {prompt_tokens}"
    due = expected_pages(prompt_tokens, prefix_tokens, plan.target_page_tokens)
    if len(pages) != due:
        return f"{len(pages)} pages where {due} are needed"
    if not pages:
        return ""
    if min(pages) < 0 or max(pages) >= plan.target_pages:
        return f"page ids from {min(pages)} to {max(pages)} in a pool of {plan.target_pages}"
    if len(set(pages)) != len(pages):
        return "a page occurs twice"
    return ""


def slot_problem(slot: int | None, prefix_tokens: int, plan: PairPlan) -> str:
    """Why `slot` cannot be the destination of this hand-off's state; an empty string if it can."""
    slots = plan.target_slots
    if (slot is None) != (slots == 0):
        return f"slot {slot} in a pool of {slots} slots"
    if slot is None:
        return ""
    if not 0 <= slot < slots:
        return f"slot {slot} in a pool of {slots} slots"
    if prefix_tokens:
        return f"a prefix of {prefix_tokens} tokens, without the state at its end"
    return ""
