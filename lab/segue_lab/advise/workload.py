"""The load on a deployment: number of requests, their lengths, latency targets. Pure."""

from __future__ import annotations

import random
import re
from typing import Annotated

import msgspec

from segue.kv import ConfigError

MAX_TOKENS = 10**7
_PART = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?(?::(\d{1,6}(?:\.\d{1,6})?))?")
_MAX_PARTS = 64

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=10**9)]


class LengthPart(msgspec.Struct, frozen=True):
    """Lengths from `low` to `high`, all as likely, with a `weight` beside the other parts."""

    low: _Tokens
    high: _Tokens
    weight: _Positive = 1.0


class Lengths(msgspec.Struct, frozen=True):
    """How many tokens a prompt, or an output, has: a mixture of ranges."""

    parts: Annotated[tuple[LengthPart, ...], msgspec.Meta(min_length=1, max_length=_MAX_PARTS)]

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """`512`, `128-1024` or `128-512:3,4000:1` (three of four are short). Raises ConfigError."""
        parts = []
        for piece in text.split(","):
            match = _PART.fullmatch(piece.strip())
            low, high, weight = match.groups() if match else ("0", None, None)
            part = LengthPart(int(low), int(high or low), float(weight or 1))
            if not 1 <= part.low <= part.high <= MAX_TOKENS or part.weight <= 0:
                raise ConfigError(
                    f"{flag} must be a length (512), a range (128-1024), or several with weights "
                    f"(128-512:3,4000:1), not {text!r}"
                )
            parts.append(part)
        if len(parts) > _MAX_PARTS:
            raise ConfigError(f"{flag} may have {_MAX_PARTS} parts, not {len(parts)}")
        return cls(tuple(parts))

    @property
    def mean(self) -> float:
        """The mean length."""
        total = sum(part.weight for part in self.parts)
        return sum(part.weight * (part.low + part.high) / 2 for part in self.parts) / total

    @property
    def longest(self) -> int:
        """The greatest length there is."""
        return max(part.high for part in self.parts)

    def draw(self, rng: random.Random) -> int:
        """One length by chance."""
        (part,) = rng.choices(self.parts, [part.weight for part in self.parts])
        return rng.randint(part.low, part.high)


class AskedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of `prompt` and `output` tokens: `rate` a second at random moments (Poisson), or always
    `concurrency` in flight; exactly one of the two is given."""

    prompt: Lengths
    output: Lengths
    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ConfigError("give --rate or --concurrency, and not both")


class LatencyTargets(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the p99 of the time to the first token, and of the time between two tokens, may be
    (seconds)."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def any(self) -> bool:
        """At least one is given."""
        return self.ttft_s is not None or self.itl_s is not None
