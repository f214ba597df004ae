"""Ranges of protocol versions: what each side of a connection speaks, and what both do."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: The highest version that fits into a preamble.
MAX_VERSION = 255

_Version = Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)]


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """All versions from `oldest` to `newest` are spoken. Raises ValueError unless 1 <= `oldest` <= `newest`
    <= 255."""

    oldest: _Version
    newest: _Version

    def __post_init__(self) -> None:
        if not 1 <= self.oldest <= self.newest <= MAX_VERSION:
            raise ValueError(f"versions {self.oldest} to {self.newest} are no range in 1 … {MAX_VERSION}")

    def common(self, theirs: Versions) -> int | None:
        """The highest version that both sides speak; None if there is none."""
        highest = min(self.newest, theirs.newest)
        return highest if highest >= max(self.oldest, theirs.oldest) else None

    def __str__(self) -> str:
        alone = self.oldest == self.newest
        return f"version {self.newest}" if alone else f"versions {self.oldest} to {self.newest}"
