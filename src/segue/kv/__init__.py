"""The hand-off of KV between two workers, as a library; all an engine needs (`docs/embedding.md`).

A name that only segue's own server needs is not here: the server imports it from its module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.kv.agent.kv_agent import KVAgent as KVAgent
    from segue.kv.agreement import Agreement as Agreement
    from segue.kv.clock import Clock as Clock
    from segue.kv.config import HOST as HOST
    from segue.kv.config import KVConfig as KVConfig
    from segue.kv.errors import DECODE_ERRORS as DECODE_ERRORS
    from segue.kv.errors import AbortedByClient as AbortedByClient
    from segue.kv.errors import BootstrapTimeout as BootstrapTimeout
    from segue.kv.errors import BootstrapUnreachable as BootstrapUnreachable
    from segue.kv.errors import ChecksumMismatch as ChecksumMismatch
    from segue.kv.errors import ConfigError as ConfigError
    from segue.kv.errors import DeadlineExceeded as DeadlineExceeded
    from segue.kv.errors import DpRankConflict as DpRankConflict
    from segue.kv.errors import DpRankOutOfRange as DpRankOutOfRange
    from segue.kv.errors import Draining as Draining
    from segue.kv.errors import ErrorCode as ErrorCode
    from segue.kv.errors import ErrorInfo as ErrorInfo
    from segue.kv.errors import Internal as Internal
    from segue.kv.errors import InvalidRequest as InvalidRequest
    from segue.kv.errors import LayoutMismatch as LayoutMismatch
    from segue.kv.errors import MetadataMismatch as MetadataMismatch
    from segue.kv.errors import OutOfCapacity as OutOfCapacity
    from segue.kv.errors import PeerLost as PeerLost
    from segue.kv.errors import PeerRefused as PeerRefused
    from segue.kv.errors import PeerRestarted as PeerRestarted
    from segue.kv.errors import RankDivergence as RankDivergence
    from segue.kv.errors import SegueError as SegueError
    from segue.kv.errors import TransferFailed as TransferFailed
    from segue.kv.errors import Unauthorized as Unauthorized
    from segue.kv.errors import meaning_of as meaning_of
    from segue.kv.handles import Handles as Handles
    from segue.kv.handles import KVReceiver as KVReceiver
    from segue.kv.handles import KVSender as KVSender
    from segue.kv.ids import MAX_ROOM as MAX_ROOM
    from segue.kv.ids import ChecksumMode as ChecksumMode
    from segue.kv.ids import Incarnation as Incarnation
    from segue.kv.ids import KVPoll as KVPoll
    from segue.kv.ids import LeaderId as LeaderId
    from segue.kv.ids import RankCoord as RankCoord
    from segue.kv.ids import Role as Role
    from segue.kv.ids import RoomKey as RoomKey
    from segue.kv.ids import Span as Span
    from segue.kv.ids import new_incarnation as new_incarnation
    from segue.kv.ids import new_room as new_room
    from segue.kv.io import IoThread as IoThread
    from segue.kv.io import MonotonicClock as MonotonicClock
    from segue.kv.layout.spec import KVShape as KVShape
    from segue.kv.layout.spec import PlaneSpec as PlaneSpec
    from segue.kv.layout.spec import PoolSpec as PoolSpec
    from segue.kv.layout.spec import StateTensor as StateTensor
    from segue.kv.limits import Limits as Limits
    from segue.kv.manager import KVManager as KVManager
    from segue.kv.model_match import model_identity as model_identity
    from segue.kv.model_weights import model_fingerprint as model_fingerprint
    from segue.kv.model_weights import weights_digest as weights_digest
    from segue.kv.peers import PathSpeed as PathSpeed
    from segue.kv.protocol.events import Change as Change
    from segue.kv.protocol.events import Phase as Phase
    from segue.kv.protocol.events import Quarantined as Quarantined
    from segue.kv.protocol.events import Release as Release
    from segue.kv.protocol.room_ranks import DpRanks as DpRanks
    from segue.kv.ranks.local_rank import Rank as Rank
    from segue.kv.ranks.local_rank import local_rank as local_rank
    from segue.kv.ranks.rank_link import RankLink as RankLink
    from segue.kv.ranks.rank_listener import RankListener as RankListener
    from segue.kv.ranks.rank_listener import connect_rank as connect_rank
    from segue.kv.ranks.rank_worker import RankWorker as RankWorker
    from segue.kv.ranks.worker_rank import WorkerRank as WorkerRank
    from segue.kv.ready import ReadyEvent as ReadyEvent
    from segue.kv.session.guarded_listener import GuardedListener as GuardedListener
    from segue.kv.session.listen import listening as listening
    from segue.kv.session.tasks import background as background
    from segue.kv.session.tls import Tls as Tls
    from segue.kv.session.tls import load_tls as load_tls
    from segue.kv.threads import threads_on as threads_on
    from segue.kv.torch_group import TorchGroup as TorchGroup
    from segue.kv.transport.kinds import KINDS as KINDS
    from segue.kv.transport.kinds import USABLE as USABLE
    from segue.kv.transport.memory.pool_memory import Memory as Memory
    from segue.kv.transport.memory.pool_memory import MemoryKind as MemoryKind
    from segue.kv.transport.memory.pool_memory import Region as Region
    from segue.kv.transport.memory.pool_memory import allocate as allocate
    from segue.kv.transport.memory.tensors import PointerView as PointerView
    from segue.kv.transport.memory.tensors import pool_of as pool_of

#: The module of each name: it is imported when the name is asked for first, so that a caller who needs an
#: identifier alone does not load asyncio and numpy.
_MODULE_OF = {
    name: module
    for module, names in {
        "segue.kv.agent.kv_agent": "KVAgent",
        "segue.kv.agreement": "Agreement",
        "segue.kv.clock": "Clock",
        "segue.kv.config": "HOST KVConfig",
        "segue.kv.errors": (
            "AbortedByClient BootstrapTimeout BootstrapUnreachable ChecksumMismatch ConfigError "
            "DECODE_ERRORS DeadlineExceeded DpRankConflict DpRankOutOfRange Draining ErrorCode "
            "ErrorInfo Internal InvalidRequest LayoutMismatch MetadataMismatch OutOfCapacity PeerLost "
            "PeerRefused PeerRestarted RankDivergence SegueError TransferFailed Unauthorized "
            "meaning_of "
        ),
        "segue.kv.handles": "Handles KVReceiver KVSender",
        "segue.kv.ids": (
            "ChecksumMode Incarnation KVPoll LeaderId MAX_ROOM RankCoord Role RoomKey Span "
            "new_incarnation new_room "
        ),
        "segue.kv.io": "IoThread MonotonicClock",
        "segue.kv.layout.spec": "KVShape PlaneSpec PoolSpec StateTensor",
        "segue.kv.limits": "Limits",
        "segue.kv.manager": "KVManager",
        "segue.kv.model_match": "model_identity",
        "segue.kv.model_weights": "model_fingerprint weights_digest",
        "segue.kv.peers": "PathSpeed",
        "segue.kv.protocol.events": "Change Phase Quarantined Release",
        "segue.kv.protocol.room_ranks": "DpRanks",
        "segue.kv.ranks.local_rank": "Rank local_rank",
        "segue.kv.ranks.rank_link": "RankLink",
        "segue.kv.ranks.rank_listener": "RankListener connect_rank",
        "segue.kv.ranks.rank_worker": "RankWorker",
        "segue.kv.ranks.worker_rank": "WorkerRank",
        "segue.kv.ready": "ReadyEvent",
        "segue.kv.session.guarded_listener": "GuardedListener",
        "segue.kv.session.listen": "listening",
        "segue.kv.session.tasks": "background",
        "segue.kv.session.tls": "Tls load_tls",
        "segue.kv.threads": "threads_on",
        "segue.kv.torch_group": "TorchGroup",
        "segue.kv.transport.kinds": "KINDS USABLE",
        "segue.kv.transport.memory.pool_memory": "Memory MemoryKind Region allocate",
        "segue.kv.transport.memory.tensors": "PointerView pool_of",
    }.items()
    for name in names.split()
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
