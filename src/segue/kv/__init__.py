"""The hand-off of KV between two workers, as a library; all an engine needs (`docs/embedding.md`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.kv.agent.kv_agent import KVAgent as KVAgent
    from segue.kv.agreement import Agreement as Agreement
    from segue.kv.clock import Clock as Clock
    from segue.kv.clock import VirtualClock as VirtualClock
    from segue.kv.config import HOST as HOST
    from segue.kv.config import KVConfig as KVConfig
    from segue.kv.config import LeaderRuntime as LeaderRuntime
    from segue.kv.config import SessionConfig as SessionConfig
    from segue.kv.control_plane import ControlPlane as ControlPlane
    from segue.kv.errors import DECODE_ERRORS as DECODE_ERRORS
    from segue.kv.errors import MAX_ERROR_TEXT as MAX_ERROR_TEXT
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
    from segue.kv.errors import NotFound as NotFound
    from segue.kv.errors import OutOfCapacity as OutOfCapacity
    from segue.kv.errors import PeerLost as PeerLost
    from segue.kv.errors import PeerRefused as PeerRefused
    from segue.kv.errors import PeerRestarted as PeerRestarted
    from segue.kv.errors import RankDivergence as RankDivergence
    from segue.kv.errors import RequestTimeout as RequestTimeout
    from segue.kv.errors import RequestTooLarge as RequestTooLarge
    from segue.kv.errors import SegueError as SegueError
    from segue.kv.errors import Starting as Starting
    from segue.kv.errors import TransferFailed as TransferFailed
    from segue.kv.errors import Unauthorized as Unauthorized
    from segue.kv.errors import meaning_of as meaning_of
    from segue.kv.errors import status_of as status_of
    from segue.kv.handles import Handles as Handles
    from segue.kv.handles import KVReceiver as KVReceiver
    from segue.kv.handles import KVSender as KVSender
    from segue.kv.ids import MAX_ROOM as MAX_ROOM
    from segue.kv.ids import OPEN_RANK as OPEN_RANK
    from segue.kv.ids import ChecksumMode as ChecksumMode
    from segue.kv.ids import FinishReason as FinishReason
    from segue.kv.ids import Incarnation as Incarnation
    from segue.kv.ids import KVPoll as KVPoll
    from segue.kv.ids import LeaderId as LeaderId
    from segue.kv.ids import RankCoord as RankCoord
    from segue.kv.ids import RankId as RankId
    from segue.kv.ids import Role as Role
    from segue.kv.ids import RoomKey as RoomKey
    from segue.kv.ids import Span as Span
    from segue.kv.ids import TransferId as TransferId
    from segue.kv.ids import new_incarnation as new_incarnation
    from segue.kv.ids import new_room as new_room
    from segue.kv.ids import successor as successor
    from segue.kv.io import IoThread as IoThread
    from segue.kv.io import MonotonicClock as MonotonicClock
    from segue.kv.layout.content import Part as Part
    from segue.kv.layout.spec import STATE_ALIGN as STATE_ALIGN
    from segue.kv.layout.spec import KVShape as KVShape
    from segue.kv.layout.spec import Plane as Plane
    from segue.kv.layout.spec import PlaneSpec as PlaneSpec
    from segue.kv.layout.spec import PoolSpec as PoolSpec
    from segue.kv.layout.spec import StateTensor as StateTensor
    from segue.kv.limits import MAX_ATTEMPTS as MAX_ATTEMPTS
    from segue.kv.limits import Limits as Limits
    from segue.kv.manager import KVManager as KVManager
    from segue.kv.model_match import model_difference as model_difference
    from segue.kv.model_match import model_identity as model_identity
    from segue.kv.path_figures import PathChoice as PathChoice
    from segue.kv.peers import PathSpeed as PathSpeed
    from segue.kv.protocol.events import Change as Change
    from segue.kv.protocol.events import Phase as Phase
    from segue.kv.protocol.events import Quarantined as Quarantined
    from segue.kv.protocol.events import Release as Release
    from segue.kv.protocol.messages import HandoffMessage as HandoffMessage
    from segue.kv.protocol.messages import PathMessage as PathMessage
    from segue.kv.protocol.messages import TokenLogprob as TokenLogprob
    from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT as FAIL_ON_CONFLICT
    from segue.kv.protocol.room_ranks import FOLLOW_BOOTSTRAP_ROOM as FOLLOW_BOOTSTRAP_ROOM
    from segue.kv.protocol.room_ranks import DpRanks as DpRanks
    from segue.kv.protocol.room_ranks import PrefillInstance as PrefillInstance
    from segue.kv.protocol.room_ranks import dp_rank_conflict as dp_rank_conflict
    from segue.kv.protocol.ticket import SpentTickets as SpentTickets
    from segue.kv.protocol.ticket import Ticket as Ticket
    from segue.kv.protocol.ticket import sign_ticket as sign_ticket
    from segue.kv.protocol.ticket import verify_ticket as verify_ticket
    from segue.kv.ranks.local_rank import Rank as Rank
    from segue.kv.ranks.local_rank import local_rank as local_rank
    from segue.kv.ranks.rank_link import RankLink as RankLink
    from segue.kv.ranks.rank_listener import RankListener as RankListener
    from segue.kv.ranks.rank_listener import connect_rank as connect_rank
    from segue.kv.ranks.rank_worker import RankWorker as RankWorker
    from segue.kv.ranks.worker_rank import WorkerRank as WorkerRank
    from segue.kv.ready import ReadyEvent as ReadyEvent
    from segue.kv.room_queries import RoomRegistry as RoomRegistry
    from segue.kv.session.tasks import background as background
    from segue.kv.session.tls import Tls as Tls
    from segue.kv.session.tls import load_tls as load_tls
    from segue.kv.threads import threads_on as threads_on
    from segue.kv.torch_group import TorchGroup as TorchGroup
    from segue.kv.transport.kinds import AUTO_TRANSPORT as AUTO_TRANSPORT
    from segue.kv.transport.kinds import KINDS as KINDS
    from segue.kv.transport.kinds import USABLE as USABLE
    from segue.kv.transport.memory.host_memory import available_bytes as available_bytes
    from segue.kv.transport.memory.host_memory import cpu_quota as cpu_quota
    from segue.kv.transport.memory.host_memory import limited_groups as limited_groups
    from segue.kv.transport.memory.pool_memory import Memory as Memory
    from segue.kv.transport.memory.pool_memory import MemoryKind as MemoryKind
    from segue.kv.transport.memory.pool_memory import Region as Region
    from segue.kv.transport.memory.pool_memory import allocate as allocate
    from segue.kv.transport.memory.tensors import PointerView as PointerView
    from segue.kv.transport.memory.tensors import pool_of as pool_of
    from segue.kv.transport.probe import FAR_UNDER as FAR_UNDER
    from segue.kv.transport.probe import SCRATCH_BYTES as SCRATCH_BYTES

#: The module of each name: it is imported when the name is asked for first, so that a caller who needs an
#: identifier alone does not load asyncio and numpy.
_MODULE_OF = {
    name: module
    for module, names in {
        "segue.kv.agent.kv_agent": "KVAgent",
        "segue.kv.agreement": "Agreement",
        "segue.kv.clock": "Clock VirtualClock",
        "segue.kv.config": "HOST KVConfig LeaderRuntime SessionConfig",
        "segue.kv.control_plane": "ControlPlane",
        "segue.kv.errors": (
            "AbortedByClient BootstrapTimeout BootstrapUnreachable ChecksumMismatch ConfigError "
            "DECODE_ERRORS DeadlineExceeded DpRankConflict DpRankOutOfRange Draining ErrorCode "
            "ErrorInfo Internal InvalidRequest LayoutMismatch MAX_ERROR_TEXT MetadataMismatch NotFound "
            "OutOfCapacity PeerLost PeerRefused PeerRestarted RankDivergence RequestTimeout "
            "RequestTooLarge SegueError Starting TransferFailed Unauthorized meaning_of status_of "
        ),
        "segue.kv.handles": "Handles KVReceiver KVSender",
        "segue.kv.ids": (
            "ChecksumMode FinishReason Incarnation KVPoll LeaderId MAX_ROOM OPEN_RANK RankCoord RankId "
            "Role RoomKey Span TransferId new_incarnation new_room successor "
        ),
        "segue.kv.io": "IoThread MonotonicClock",
        "segue.kv.layout.content": "Part",
        "segue.kv.layout.spec": "KVShape Plane PlaneSpec PoolSpec STATE_ALIGN StateTensor",
        "segue.kv.limits": "Limits MAX_ATTEMPTS",
        "segue.kv.manager": "KVManager",
        "segue.kv.model_match": "model_difference model_identity",
        "segue.kv.path_figures": "PathChoice",
        "segue.kv.peers": "PathSpeed",
        "segue.kv.protocol.events": "Change Phase Quarantined Release",
        "segue.kv.protocol.messages": "HandoffMessage PathMessage TokenLogprob",
        "segue.kv.protocol.room_ranks": (
            "DpRanks FAIL_ON_CONFLICT FOLLOW_BOOTSTRAP_ROOM PrefillInstance dp_rank_conflict "
        ),
        "segue.kv.protocol.ticket": "SpentTickets Ticket sign_ticket verify_ticket",
        "segue.kv.ranks.local_rank": "Rank local_rank",
        "segue.kv.ranks.rank_link": "RankLink",
        "segue.kv.ranks.rank_listener": "RankListener connect_rank",
        "segue.kv.ranks.rank_worker": "RankWorker",
        "segue.kv.ranks.worker_rank": "WorkerRank",
        "segue.kv.ready": "ReadyEvent",
        "segue.kv.room_queries": "RoomRegistry",
        "segue.kv.session.tasks": "background",
        "segue.kv.session.tls": "Tls load_tls",
        "segue.kv.threads": "threads_on",
        "segue.kv.torch_group": "TorchGroup",
        "segue.kv.transport.kinds": "AUTO_TRANSPORT KINDS USABLE",
        "segue.kv.transport.memory.host_memory": "available_bytes cpu_quota limited_groups",
        "segue.kv.transport.memory.pool_memory": "Memory MemoryKind Region allocate",
        "segue.kv.transport.memory.tensors": "PointerView pool_of",
        "segue.kv.transport.probe": "FAR_UNDER SCRATCH_BYTES",
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
