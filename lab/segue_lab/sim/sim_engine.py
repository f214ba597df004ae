"""An engine without a model whose KV proves its own origin.

The KV of a token is a 64-bit hash of the whole sequence up to and including that token (its
*lineage*). A step first checks every earlier position of the sequence in the pool: a page of
somebody else, a stale byte or a missing write is seen at once, by whoever would have used it.
The next token is a function of the lineage, so the right answer is known without a model.

Where sequences keep a state beside their KV, it is the lineage after the last token, in each word of the
slot.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import numpy as np
import xxhash

from segue.engine.engine_api import (
    Formats,
    HostPages,
    ModelInfo,
    OnStored,
    SequenceResult,
    SequenceStep,
    StepHandle,
    StepOnCall,
)
from segue.engine.request import SamplingParams, TokenLogprob
from segue.kv.errors import ChecksumMismatch
from segue.kv.ids import Span
from segue.kv.layout.spec import STATE_ALIGN, KVShape, PlaneSpec, PoolSpec, StateTensor

MASK = 2**64 - 1
SEED = 0x9E3779B97F4A7C15
VALUE_MARK = 0x5555555555555555
_WORD = struct.Struct("<Q")


class WrongKV(AssertionError):
    """A sequence would have been computed from KV that is not its own."""


def lineage(tokens: Sequence[int], start: int = SEED) -> int:
    """The hash of a sequence of tokens, continued from `start`."""
    for token in tokens:
        start = ((start ^ token) * 0x100000001B3 + 0x9E3779B97F4A7C15) & MASK
        start ^= start >> 29
    return start


def next_token(state: int, sampling: SamplingParams, vocab_size: int) -> int:
    """The token that follows a sequence with this lineage; depends on the seed unless greedy."""
    seed = sampling.seed if sampling.temperature > 0 else 0
    return lineage([seed & MASK], state) % vocab_size


def logprob_of(tokens: Sequence[int], at: int) -> TokenLogprob | None:
    """The log-probability of the token at this place of a prompt; the first one has none."""
    return TokenLogprob(tokens[at], -(at + tokens[at] / 1000)) if at else None


def reference(prompt: Sequence[int], sampling: SamplingParams, vocab_size: int, count: int) -> list[int]:
    """The first `count` tokens that a fault-free run generates (no end of sequence considered)."""
    state, output = lineage(prompt), []
    for _ in range(count):
        token = next_token(state, sampling, vocab_size)
        output.append(token)
        state = lineage([token], state)
    return output


def answer(
    prompt: Sequence[int], sampling: SamplingParams, vocab_size: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """The whole output of a fault-free run: it ends with the first stop token after `min_tokens` others, or
    with `max_tokens`."""
    output = reference(prompt, sampling, vocab_size, sampling.max_tokens)
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
    for at in range(sampling.min_tokens, len(output)):
        if output[at] in stops:
            return output[: at + 1]
    return output


def lineage_spec(
    pages: int,
    page_tokens: int = 4,
    layers: int = 2,
    heads: int = 1,
    *,
    latent: bool = False,
    page_major: bool = False,
    slots: int = 0,
) -> PoolSpec:
    """A pool whose items are 8-byte lineages, of K and V or of a latent; layer-major, or all layers of a page
    together. With `slots` sequences keep a state (then it is layer-major)."""
    items = STATE_ALIGN // _WORD.size
    state = StateTensor(name="state", layers=1, shape=(items,), dtype="lineage", item_bytes=_WORD.size)
    shape = KVShape(
        kind="mla" if latent else "mha",
        layers=layers,
        kv_heads=heads,
        k_dim=1,
        v_dim=0 if latent else 1,
        dtype="lineage",
        item_bytes=8,
        state=(state,) if slots else (),
    )
    spec = PoolSpec(
        shape=shape,
        pages=pages,
        page_tokens=page_tokens,
        layer_count=layers,
        head_count=heads,
        slots=slots,
    )
    if slots or not page_major:
        return spec
    token = 8 * heads
    planes = (
        PlaneSpec(0, at * page_tokens * token, spec.page_bytes, token, 8) for at in range(spec.kinds * layers)
    )
    return msgspec.structs.replace(spec, regions=(spec.nbytes,), planes=tuple(planes))


@dataclass(frozen=True, slots=True)
class Copied:
    """Host copy of pages, and of a slot behind them."""

    pages: tuple[bytes, ...]
    digest: int

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.pages))


@dataclass(slots=True)
class _Open:
    tokens: list[int]
    sampling: SamplingParams
    prompt_tokens: int
    #: the lineage after each of the first tokens, as far as it was needed
    states: list[int] = field(default_factory=list)

    def lineage_to(self, end: int) -> list[int]:
        """`states`, for the first `end` tokens at least."""
        states = self.states
        while len(states) < end:
            at = len(states)
            states.append(lineage(self.tokens[at : at + 1], states[-1] if states else SEED))
        return states


class LineageEngine:
    """Implements `engine.engine_api.Engine`. `memory` is the pool; transports may copy into it. `ranks` say
    what is where in it, if it is not that of one rank with all of `spec`.
    Engines of another `model` give the same tokens, but their KV is not each other's.

    Raises WrongKV from `collect` when a position does not hold the sequence's own KV.
    """

    def __init__(
        self,
        spec: PoolSpec,
        memory: bytearray | memoryview | None = None,
        *,
        ranks: Sequence[PoolSpec] = (),
        vocab_size: int = 1000,
        context_tokens: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
        model: str = "lineage-1",
    ) -> None:
        self.spec = spec
        self.formats: Formats | None = None
        self.ranks = list(ranks or [spec])
        nbytes = self.ranks[0].nbytes
        self.memory: bytearray | memoryview = bytearray(nbytes) if memory is None else memory
        self.info = ModelInfo(
            name="lineage",
            fingerprint=model,
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            eos_token_ids=eos_token_ids,
            dtype="lineage",
        )
        self.computed_tokens = 0
        own = lineage(model.encode())
        #: for each head of each plane (K or V of a layer) of each rank: the place of each slot, its mark, and
        #: its name
        self._by_rank = [
            list(_planes(rank, own, f"rank {number}, ")) for number, rank in enumerate(self.ranks)
        ]
        self._planes = list(itertools.chain(*self._by_rank))
        self._state_mark = own ^ VALUE_MARK ^ MASK
        #: the page that each word of the pool belongs to; slots are counted on behind the pages (`touched`)
        self.page_of_word = _page_of_word(spec, tuple(self.ranks))
        self._open: dict[int, _Open] = {}

    # ---- sequences ---------------------------------------------------------------------------

    def open(
        self, seq_id: int, prompt: Sequence[int], sampling: SamplingParams, output: Sequence[int] = ()
    ) -> None:
        """Begin a sequence."""
        tokens = [*prompt, *output]
        self._open[seq_id] = _Open(tokens, sampling, len(tokens))

    def append(self, seq_id: int, token: int) -> None:
        """A token drawn elsewhere."""
        self._open[seq_id].tokens.append(token)

    def close(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._open.pop(seq_id, None)

    def sizes(self) -> dict[str, int]:
        """Open sequences, for leak checks."""
        return {"sequences": len(self._open)}

    def touched(self, pages: Sequence[int], slot: int | None) -> set[int]:
        """Pages and a slot as `page_of_word` counts them."""
        return set(pages) | (set() if slot is None else {self.spec.pages + slot})

    # ---- the forward -------------------------------------------------------------------------

    def launch(
        self, steps: Sequence[SequenceStep], on_stored: OnStored, on_ready: Callable[[], None]
    ) -> StepHandle:
        """Nothing is computed before `collect`."""
        return StepOnCall(steps, on_stored)

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        """Check what is there, write what is new, give the next token where asked."""
        assert isinstance(handle, StepOnCall)
        self.store(handle.steps)
        handle.on_stored([step.seq_id for step in handle.steps])
        return self.draw(handle.steps)

    def store(self, steps: Sequence[SequenceStep]) -> None:
        """The first part of a step: check what is there, write what is new."""
        for step in steps:
            self._store(step)

    def draw(self, steps: Sequence[SequenceStep]) -> list[SequenceResult]:
        """The second part: the next token where asked."""
        return [
            self._draw(step)
            for step in steps
            if step.sample or self._open[step.seq_id].sampling.prompt_logprobs is not None
        ]

    def _store(self, step: SequenceStep) -> None:
        opened = self._open[step.seq_id]
        end = step.start + len(step.tokens)
        if list(step.tokens) != opened.tokens[step.start : end]:
            raise WrongKV(f"sequence {step.seq_id} was given other tokens than its own")
        states = opened.lineage_to(end)
        if step.slot is not None:
            self._move_state(step, states)
        for position in range(end):
            slot = self._slot(step.pages, position)
            if position >= step.start:
                self._write(slot, states[position])
            else:
                self._check(step.seq_id, position, slot, states[position])
        self.computed_tokens += len(step.tokens)

    def _move_state(self, step: SequenceStep, states: Sequence[int]) -> None:
        assert step.slot is not None
        for at in self._state_words(step.slot):
            found = _WORD.unpack_from(self.memory, at)[0] ^ self._state_mark
            if step.start and found != states[step.start - 1]:
                raise WrongKV(f"sequence {step.seq_id}: slot {step.slot} holds another state than its own")
            _WORD.pack_into(self.memory, at, states[step.span.end - 1] ^ self._state_mark)

    def put(self, tokens: Sequence[int], span: Span, pages: Sequence[int]) -> None:
        """Write the KV of `span` of a sequence that is not open here."""
        states = _Open(list(tokens), SamplingParams(), len(tokens)).lineage_to(span.end)
        for position in range(span.start, span.end):
            self._write(self._slot(pages, position), states[position])

    def verify(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Raises WrongKV unless `pages` hold the KV of all `tokens`."""
        for position, state in enumerate(_Open(list(tokens), SamplingParams(), 0).lineage_to(len(tokens))):
            self._check(0, position, self._slot(pages, position), state)

    def _draw(self, step: SequenceStep) -> SequenceResult:
        opened = self._open[step.seq_id]
        states = opened.lineage_to(step.span.end)
        prompt = None
        if opened.sampling.prompt_logprobs is not None and step.start < opened.prompt_tokens:
            prompt = [logprob_of(opened.tokens, at) for at in range(step.start, step.span.end)]
        if not step.sample:
            return SequenceResult(step.seq_id, prompt_logprobs=prompt)
        token = next_token(states[step.span.end - 1], opened.sampling, self.info.vocab_size)
        opened.tokens.append(token)
        return SequenceResult(step.seq_id, token, prompt_logprobs=prompt)

    def _slot(self, pages: Sequence[int], position: int) -> int:
        page, inside = divmod(position, self.spec.page_tokens)
        return pages[page] * self.spec.page_tokens + inside

    def _write(self, slot: int, state: int) -> None:
        for places, mark, _ in self._planes:
            _WORD.pack_into(self.memory, places[slot], state ^ mark)

    def spoil(self, rank: int, pages: Sequence[int], position: int) -> None:
        """`rank` has stored something else than the KV of this position."""
        for places, mark, _ in self._by_rank[rank]:
            _WORD.pack_into(self.memory, places[self._slot(pages, position)], SEED ^ mark)

    def _check(self, seq_id: int, position: int, slot: int, state: int) -> None:
        for places, mark, plane in self._planes:
            if _WORD.unpack_from(self.memory, places[slot])[0] != state ^ mark:
                raise WrongKV(
                    f"sequence {seq_id}, token {position}, {plane}: "
                    f"page {slot // self.spec.page_tokens} holds somebody else's KV"
                )

    # ---- retraction --------------------------------------------------------------------------

    def _words(self, page: int) -> list[int]:
        """The place of each word of a page."""
        slots = slice(page * self.spec.page_tokens, (page + 1) * self.spec.page_tokens)
        return [at for places, _, _ in self._planes for at in places[slots]]

    def _state_words(self, slot: int) -> range:
        """The place of each word of a slot."""
        at = self.spec.slot_offset(slot)
        return range(at, at + self.spec.shape.state_bytes, _WORD.size)

    def _words_of(self, pages: Sequence[int], slot: int | None) -> list[Sequence[int]]:
        state = [] if slot is None else [self._state_words(slot)]
        return [*(self._words(page) for page in pages), *state]

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostPages:
        """Copy pages, and a slot, out of the pool."""
        size = _WORD.size
        copies = tuple(
            b"".join(bytes(self.memory[at : at + size]) for at in words)
            for words in self._words_of(pages, slot)
        )
        return Copied(copies, xxhash.xxh3_64_intdigest(b"".join(copies)))

    def copy_in(self, host: HostPages, pages: Sequence[int], slot: int | None = None) -> None:
        """Copy pages, and a slot, back."""
        assert isinstance(host, Copied)
        if xxhash.xxh3_64_intdigest(b"".join(host.pages)) != host.digest:
            raise ChecksumMismatch("KV changed in host memory", phase="copy_in")
        size = _WORD.size
        for words, data in zip(self._words_of(pages, slot), host.pages, strict=True):
            for index, at in enumerate(words):
                self.memory[at : at + size] = data[index * size : (index + 1) * size]


def _planes(rank: PoolSpec, own: int, name: str) -> Iterator[tuple[list[int], int, str]]:
    """See `LineageEngine._planes`."""
    places = iter(_places(rank))
    for layer in range(rank.layer_count):
        for value in (False, True)[: rank.kinds]:
            for head in range(rank.head_count):
                number, of_head = rank.layer_start + layer, rank.head_start + head
                mark = own ^ number ^ (of_head << 16) ^ (VALUE_MARK if value else 0)
                yield next(places), mark, f"{name}layer {number}, {'KV'[value]}, head {of_head}"


@lru_cache(maxsize=64)
def _places(rank: PoolSpec) -> list[list[int]]:
    """The place of each slot of each head of each plane. All incarnations of a node have the same."""
    pages, inside = np.divmod(np.arange(rank.pages * rank.page_tokens), rank.page_tokens)
    found: list[list[int]] = []
    for layer in range(rank.layer_count):
        for value in (False, True)[: rank.kinds]:
            plane = rank.plane(layer, value)
            first = plane.offset + pages * plane.page_stride + inside * plane.token_stride
            found += [(first + head * plane.head_stride).tolist() for head in range(rank.head_count)]
    return found


@lru_cache(maxsize=64)
def _page_of_word(spec: PoolSpec, ranks: tuple[PoolSpec, ...]) -> list[int]:
    """See `LineageEngine.page_of_word`."""
    found = np.zeros(ranks[0].nbytes // _WORD.size, np.int64)
    page = np.arange(spec.pages * spec.page_tokens) // spec.page_tokens
    for rank in ranks:
        for places in _places(rank):
            found[np.asarray(places) // _WORD.size] = page[: len(places)]
    for slot in range(spec.slots):
        at = spec.slot_offset(slot) // _WORD.size
        found[at : at + spec.shape.state_bytes // _WORD.size] = spec.pages + slot
    listed: list[int] = found.tolist()
    return listed
