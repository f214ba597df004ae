"""Answers that consist of blocks in order (reasoning, text, calls), as Responses and Messages have them.

Each event of a stream opens, extends or closes a block; a whole answer lists the same blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from segue.engine.request import FinishReason
from segue.server.frontend.answers import Answer, Choice, Json
from segue.server.frontend.dialects import named_event
from segue.server.frontend.generate import Piece
from segue.server.frontend.reply_parts import Part, Thought, ToolCall


@dataclass(slots=True)
class Block:
    """One block. `call` is that of a block of the kind `call`; the other kinds grow by `texts`."""

    kind: Literal["thought", "text", "call"]
    index: int
    call: ToolCall | None = None
    texts: list[str] = field(default_factory=list)
    #: It has ended; the last block of an answer that was cut has not.
    closed: bool = False

    @property
    def text(self) -> str:
        """Reasoning, text, or a call's arguments."""
        return self.call.arguments if self.call is not None else "".join(self.texts)


class BlockAnswer(Answer):
    """The answer of one sample in blocks. A subclass says how each step looks as events."""

    #: The last event of a stream repeats all that was said, or counts it.
    keeps_streamed = True

    def __init__(self, chat: Answer) -> None:
        super().__init__(chat.shape, chat.choices, chat.tokenizer)
        self.blocks: list[Block] = []

    @property
    def choice(self) -> Choice:
        """The only sample."""
        return self.choices[0]

    @property
    def cut(self) -> bool:
        """Whether `max_tokens` has ended the answer."""
        return self.choice.finish is FinishReason.LENGTH

    @property
    def repeated_bytes(self) -> int:
        return 0

    def shown_logprobs(self, choice: Choice, piece: Piece) -> dict[str, list[Any]]:
        """None: these APIs are served without log-probabilities."""
        return {}

    def usage_chunk(self) -> Json:
        return {}

    def add(self, index: int, piece: Piece) -> None:
        for _ in self._steps(piece):
            pass

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        begins = [] if self.choice.begun else list(self.begin())
        self.choice.begun = True
        return begins + list(self._steps(piece))

    def events(self, index: int, piece: Piece) -> bytes:
        return b"".join(named_event(event) for event in self.chunks(index, piece))

    def usage_event(self) -> bytes:
        return b"".join(named_event(event) for event in self.end())

    def _steps(self, piece: Piece) -> Iterator[Json]:
        choice = self.choice
        parts = choice.read(piece)
        if piece.finish is not None:
            choice.finish, choice.stop_reason = piece.finish, piece.stop_reason
        for part in parts:
            yield from self._take(part)
        if piece.finish is not None:
            yield from self._closed(cut=self.cut)

    def _take(self, part: Part) -> Iterator[Json]:
        kind: Literal["thought", "text"] = "thought" if isinstance(part, Thought) else "text"
        open_block = self.blocks[-1] if self.blocks and not self.blocks[-1].closed else None
        if isinstance(part, ToolCall):
            yield from self._closed()
            block = Block("call", len(self.blocks), part)
            self.blocks.append(block)
            yield from self.opened(block)
            yield from self.extended(block, part.arguments)
            return
        if open_block is None or open_block.kind != kind:
            yield from self._closed()
            open_block = Block(kind, len(self.blocks))
            self.blocks.append(open_block)
            yield from self.opened(open_block)
        text = part.text if isinstance(part, Thought) else part
        open_block.texts.append(text)
        yield from self.extended(open_block, text)

    def _closed(self, *, cut: bool = False) -> Iterator[Json]:
        if self.blocks and not self.blocks[-1].closed:
            self.blocks[-1].closed = not cut
            yield from self.closed(self.blocks[-1])

    @abstractmethod
    def begin(self) -> Iterator[Json]:
        """The events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> Iterator[Json]:
        """The events of a new block, which is empty but for the name of a call."""

    @abstractmethod
    def extended(self, block: Block, text: str) -> Iterator[Json]:
        """The events of more text of a block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterator[Json]:
        """The events of a block that has ended; of one that was cut, `Block.closed` is false."""

    @abstractmethod
    def end(self) -> Iterator[Json]:
        """The events after the last block."""
