"""What a scheduler is told about the instance that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.core.limits import Limits
from segue.core.types import LeaderId


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`me` is the leader that tickets must name, `name` what errors call it. A step computes at most
    `chunk_tokens` tokens of prompts. Tickets are signed with `secret`, or not at all if it is empty."""

    me: LeaderId
    name: str
    limits: Limits = field(default_factory=Limits)
    chunk_tokens: int = 512
    secret: bytes = b""
