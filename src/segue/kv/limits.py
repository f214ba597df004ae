"""Every queue, buffer and wait has a limit; the shared ones are here, with their units."""

from __future__ import annotations

import msgspec

#: Times that one request is placed in all, the first included, when workers fail.
MAX_ATTEMPTS = 4


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one process. All are positive; times in seconds, sizes in bytes."""

    request_budget_s: float = 600.0
    max_transfers: int = 4096
    max_early_destinations: int = 1024
    max_frame_bytes: int = 64 * 2**20
    #: More than a leader has to say at once on a new session: how each of its hand-offs has ended.
    max_session_backlog_bytes: int = 128 * 2**20
    max_sessions: int = 1024
    handshake_s: float = 5.0
    keepalive_s: float = 2.0
    peer_silence_s: float = 10.0
    connect_s: float = 5.0
    max_body_bytes: int = 8 * 2**20
    max_queue: int = 1024
    max_spent_tickets: int = 2**18
    max_batch: int = 64
    drain_s: float = 30.0
    registry_ttl_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
