"""Every queue, buffer and wait has a limit; the shared ones are here, with their units."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one process. All are positive (else ValueError); times in seconds, sizes in bytes."""

    #: longest time for one request, retries included
    request_budget_s: float = 600.0
    #: open hand-offs of one manager; one more fails with OUT_OF_CAPACITY
    max_transfers: int = 4096
    #: destinations from decode, and words that there will be none, that prefill keeps until its own half of
    #: the hand-off begins; and destinations that wait to replace another one
    max_early_destinations: int = 1024
    #: page ids in these destinations
    max_early_pages: int = 2**20
    #: how long one of them waits at most
    early_wait_s: float = 600.0
    #: share of both that one decode leader may use
    early_share: float = 0.25
    #: bindings of one room that may fail before the room fails
    max_bindings: int = 3
    #: the engine's own bytes that go from prefill to decode with the KV of one prompt
    max_metadata_bytes: int = 2**20
    #: one message of a session
    max_frame_bytes: int = 64 * 2**20
    #: messages that wait for a peer; on a new session a leader says at once how each hand-off has ended
    max_session_backlog_bytes: int = 128 * 2**20
    #: sessions of one process; further peers are refused
    max_sessions: int = 1024
    #: time for an incoming connection to prove who it is
    handshake_s: float = 5.0
    #: a ping is sent after this time without a message
    keepalive_s: float = 2.0
    #: a session ends with PEER_LOST after this time without a byte
    peer_silence_s: float = 10.0
    #: time to connect to a peer, and to start or close the I/O thread
    connect_s: float = 5.0
    #: body of an HTTP request
    max_body_bytes: int = 8 * 2**20
    #: requests that wait in one instance
    max_queue: int = 1024
    #: sequences computed in one step
    max_batch: int = 64
    #: time for open requests to end when an instance drains
    drain_s: float = 30.0
    #: an instance leaves the registry's list after this time without a keep-alive
    registry_ttl_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
