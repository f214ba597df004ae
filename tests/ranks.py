"""Ranks that tests speak of by a word."""

from __future__ import annotations

from segue.core.types import Incarnation, LeaderId, RankId


def rank(word: str, dp_rank: int = 0, number: int = 0) -> RankId:
    """The rank `number` of a leader whose incarnation spells `word` in hex digits."""
    return RankId(LeaderId(Incarnation(word.encode("ascii").hex().ljust(32, "0")), dp_rank), number)
