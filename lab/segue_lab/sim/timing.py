"""How fast a deployment is, and how patient."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """How fast things are, in seconds and bytes per second."""

    latency_s: float = 0.0005
    jitter: float = 1.0
    hop_s: float = 0.00005
    break_seen_s: float = 0.02
    keepalive_s: float = 0.5
    silence_s: float = 2.0
    retry_s: float = 0.1
    connect_s: float = 1.0
    step_s: float = 0.002
    token_s: float = 0.00005
    link_bytes_s: float = 2e6
    slice_s: float = 0.0005

    @property
    def bound_s(self) -> float:
        """Within which one side learns of the other's end (16) or gets its memory back (18)."""
        return self.silence_s + self.keepalive_s + 3 * self.break_seen_s + self.connect_s + 2
