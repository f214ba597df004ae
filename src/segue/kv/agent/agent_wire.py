"""Messages between an engine's process and its agent, over a `ProcessLink`.

The engine speaks first: `SetUpCommand`, answered by `ServesAnswer` or `CannotAnswer`. Then it sends the
events of its handles as they are (`EngineEvent`), and the agent the changes that its manager reports
(`Change`). Each further `…Command` is a call of the engine; to a `CountCommand` the agent says a
`CountAnswer`.
"""

from __future__ import annotations

import msgspec

from segue.kv.config import KVConfig
from segue.kv.errors import ErrorInfo, InvalidRequest, SegueError
from segue.kv.ids import LeaderId
from segue.kv.peers import PathSpeed
from segue.kv.process_link import HEAD, encode
from segue.kv.protocol import events
from segue.kv.ready import ReadyEvent


class PoolFile(msgspec.Struct, frozen=True):
    """One region of the pool: `nbytes` of the memfd that the agent has inherited as `fd`."""

    fd: int
    nbytes: int


class SetUpCommand(msgspec.Struct, frozen=True, tag=True):
    """Be the manager of this `config` over this `pool`, until the process `engine` ends. `tls` are the paths
    of its three files, which stand for `config.tls`. Log lines from `log_level` on are sent."""

    config: KVConfig
    tls: tuple[str, str, str] | None
    pool: list[PoolFile]
    engine: int
    log_level: int


class MomentCommand(msgspec.Struct, frozen=True, tag=True):
    """The moment `ready` has come, or never will."""

    ready: int
    error: ErrorInfo | None = None


class AddPeerCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVManager.add_peer`."""

    leader: LeaderId
    host: str
    port: int


class RemovePeerCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVManager.remove_peer`."""

    leader: LeaderId


class CountCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVManager.sizes`, `problems` and `paths`; `number` names the question."""

    number: int


class CloseCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVManager.close`; the process ends after it. An end of the link without it is the engine's death."""


class ServesAnswer(msgspec.Struct, frozen=True, tag=True):
    """The manager has started and listens there."""

    host: str
    port: int


class CannotAnswer(msgspec.Struct, frozen=True, tag=True):
    """The manager could not be made or started; the agent ends."""

    error: ErrorInfo


class CountAnswer(msgspec.Struct, frozen=True, tag=True):
    """The answer to the `CountCommand` of this number."""

    number: int
    sizes: dict[str, int]
    problems: list[str]
    paths: dict[str, PathSpeed]


class LogAnswer(msgspec.Struct, frozen=True, tag=True):
    """A line for the logger `name` of the engine's process."""

    level: int
    name: str
    text: str


AgentCommand = (
    SetUpCommand
    | events.EngineEvent
    | MomentCommand
    | AddPeerCommand
    | RemovePeerCommand
    | CountCommand
    | CloseCommand
)
AgentAnswer = ServesAnswer | CannotAnswer | events.Change | CountAnswer | LogAnswer

#: stands for each event where a frame is only checked
_ANY_READY_EVENT = ReadyEvent(0, lambda _wait, _ended: None)
_engine_events: msgspec.msgpack.Decoder[events.EngineEvent] = msgspec.msgpack.Decoder(
    events.EngineEvent, dec_hook=lambda _kind, _number: _ANY_READY_EVENT
)


def frame_of(event: events.EngineEvent) -> bytes:
    """The frame of what an engine's handle asks. Raises InvalidRequest for an argument of a wrong type or
    size: at the agent it would be nonsense, which ends the link and all hand-offs."""
    try:
        if isinstance(event, events.SendChunk):  # as a number it might be another chunk's
            msgspec.convert(event.ready, ReadyEvent | None)
        frame = encode(event)
        _engine_events.decode(memoryview(frame)[HEAD.size :])
    except SegueError:
        raise
    except Exception as error:
        raise InvalidRequest(f"a wrong argument: {error}") from error
    return frame
