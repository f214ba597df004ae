"""The vocabulary of segue. Read this file first; every other room speaks in these words.

Pure: no socket, thread, clock, torch or HTTP module.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from typing import NewType

import msgspec

#: The largest room: rooms are unsigned 64-bit integers, and 0 is none.
MAX_ROOM = 2**64 - 1
#: The DP rank of a prefill leader that is not known yet to who speaks of it: only in a ticket, and in the
#: name of a receiver until the rank is found.
OPEN_RANK = -1

#: A random 128-bit id, 32 lower-case hex digits, made at each start of an instance.
#: A restarted instance is another peer, even at the same address.
Incarnation = NewType("Incarnation", str)


def new_incarnation() -> Incarnation:
    """A fresh incarnation from the operating system's random source."""
    return Incarnation(secrets.token_hex(16))


def successor(incarnation: Incarnation, role: Role) -> Incarnation:
    """The incarnation of the instance `incarnation` after its switch to `role`. A function of both, so that
    all its leaders, and a repeated order, find the same one."""
    return Incarnation(hashlib.blake2b(f"{incarnation} {role}".encode(), digest_size=16).hexdigest())


def new_room() -> int:
    """A fresh room: uniform in 1 … 2**63 - 1, the range that foreign routers also accept."""
    return secrets.randbelow(2**63 - 1) + 1


class KVPoll(enum.IntEnum):
    """The phase of one hand-off. `min` over ranks is the phase of the slowest rank."""

    FAILED = 0  #: final; the handle's `error` says why
    BOOTSTRAPPING = 1  #: the peer is not connected, or prefill knows no destination yet
    WAITING_FOR_INPUT = 2  #: the engine's turn: decode calls `send_metadata`, prefill calls `send`
    TRANSFERRING = 3  #: chunks are on their way
    SUCCESS = 4  #: final; decode has all KV and the metadata, and prefill knows it

    @property
    def terminal(self) -> bool:
        """True for FAILED and SUCCESS, which are final."""
        return self in (KVPoll.FAILED, KVPoll.SUCCESS)


class Role(enum.StrEnum):
    """The role of an instance."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    FRONTEND = "frontend"
    #: a command line that looks at instances and steers them; it is never registered
    OPERATOR = "operator"


class ChecksumMode(enum.StrEnum):
    """How much of a chunk its checksum covers: all of it, one layer in several, or nothing."""

    FULL = "full"
    SAMPLED = "sampled"
    OFF = "off"


class ChecksumKind(enum.StrEnum):
    """How a checksum is computed, the preferred one first: `XXH3` (XXH3-64) reads memory of a host, `WORDS`
    (`kv.ranks.word_checksum`) also that of a device."""

    XXH3 = "xxh3-64"
    WORDS = "words-64"


class LeaderId(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """The identity of one replica in sessions, hand-offs and error records: the `incarnation` of its process
    and its data-parallel rank `dp_rank`, 0 for an engine without DP. A frontend has one too, of rank 0.

    A new process needs a new incarnation: peers take an old one for the same process with the same memory.
    """

    incarnation: Incarnation
    dp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation[:8]} dp{'?' if self.is_open else self.dp_rank}"

    @property
    def is_open(self) -> bool:
        """Whether the rank of the incarnation is not known yet."""
        return self.dp_rank == OPEN_RANK


class RankId(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One rank (worker process) of the replica `leader`: `rank` counts from 0 in the order of
    `LeaderInfo.ranks`."""

    leader: LeaderId
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.leader} rank {self.rank}"


def _check_room(room: int, **counters: int) -> None:
    if not 1 <= room <= MAX_ROOM:
        raise ValueError(f"room must be in 1 … 2**64 - 1, not {room}")
    for name, value in counters.items():
        if not 0 <= value < 2**16:
            raise ValueError(f"{name} must be in 0 … 65535, not {value}")


class RoomKey(msgspec.Struct, frozen=True, order=True, array_like=True, cache_hash=True):
    """An engine's name of one half of a request's hand-off.

    `room` is a non-zero unsigned 64-bit integer that is minted for each request. `generation` counts the uses
    of one room, `ordinal` the samples of one request, both from 0. `attempt` is decode's alone: prefill keeps
    one room for all attempts, under attempt 0.
    """

    room: int
    generation: int = 0
    ordinal: int = 0
    attempt: int = 0

    def __post_init__(self) -> None:
        _check_room(self.room, generation=self.generation, ordinal=self.ordinal, attempt=self.attempt)

    def __str__(self) -> str:
        return f"{self.room:x}.{self.attempt}" + (
            f" generation {self.generation} ordinal {self.ordinal}" if self.generation or self.ordinal else ""
        )

    @property
    def registered(self) -> int:
        """The number under which a registry knows the DP rank of this room and generation."""
        if not self.generation:
            return self.room
        name = f"{self.room} {self.generation}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") or 1


class TransferId(msgspec.Struct, frozen=True, order=True, array_like=True, cache_hash=True):
    """The identity of one hand-off, never changed or reused: attempt number `attempt` (from 0) at the `room`
    of this `generation` and `ordinal` (see `RoomKey`), by the leaders `prefill` and `decode`."""

    room: int
    attempt: int
    prefill: LeaderId
    decode: LeaderId
    generation: int = 0
    ordinal: int = 0

    def __post_init__(self) -> None:
        _check_room(self.room, attempt=self.attempt, generation=self.generation, ordinal=self.ordinal)

    @property
    def sent_as(self) -> RoomKey:
        """Prefill's room that this hand-off is of."""
        return RoomKey(self.room, self.generation, self.ordinal)

    @property
    def received_as(self) -> RoomKey:
        """Decode's half that this hand-off is of."""
        return RoomKey(self.room, self.generation, self.ordinal, self.attempt)

    def __str__(self) -> str:
        return f"{self.received_as} ({self.prefill} > {self.decode})"


class RankCoord(msgspec.Struct, frozen=True, order=True):
    """The coordinates of one rank (worker process) in its instance: data-parallel `dp`, pipeline-parallel
    `pp`, context-parallel `cp`, tensor-parallel `tp`, each from 0."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A half-open range of tokens, from `start` to before `end`, of one prompt; token 0 is the prompt's
    first. Raises ValueError unless 0 <= `start` <= `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a span needs 0 <= start <= end, not [{self.start}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.start
