"""Messages between an engine's process and its agent, over a `ProcessLink`.

The engine speaks first: `SetUpCommand`, answered by `ServesAnswer` or `CannotAnswer`. Each further `…Command`
is a call of the engine; to a `CountCommand` the agent says a `CountAnswer`. All other answers are what the
manager reports.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from segue.kv.config import KVConfig
from segue.kv.errors import ErrorInfo, InvalidRequest, SegueError
from segue.kv.ids import LeaderId
from segue.kv.peers import PathSpeed
from segue.kv.process_link import HEAD, encode
from segue.kv.protocol import events


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


class ExpectCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVManager.expect`."""

    event: events.ExpectRoom


class ReceiveCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVManager.receive`."""

    event: events.OpenReceiver


class DeclineCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVManager.decline`."""

    event: events.DeclineRoom


class PublishCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVReceiver.publish`."""

    event: events.Publish


class ChunkCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVSender.send`. The chunk is complete at the moment with the number `ready`, if there is one."""

    event: events.SendChunk
    ready: int | None = None


class ContentCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVSender.finish`."""

    event: events.SendMetadata


class EndCommand(msgspec.Struct, frozen=True, tag=True):
    """`abort`, `close` and `evict` of a handle."""

    event: events.EndRoom


class AllowCommand(msgspec.Struct, frozen=True, tag=True):
    """`KVSender.allow`."""

    event: events.AllowReplacement


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


class PhaseAnswer(msgspec.Struct, frozen=True, tag=True):
    """A half entered a phase."""

    change: events.Phase


class ReleaseAnswer(msgspec.Struct, frozen=True, tag=True):
    """The pages of a half are back."""

    change: events.Release


class QuarantineAnswer(msgspec.Struct, frozen=True, tag=True):
    """The published pages of a half wait for a proof."""

    change: events.Quarantined


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


#: Calls of the engine about one half of a room.
HalfCommand = (
    ExpectCommand
    | ReceiveCommand
    | DeclineCommand
    | PublishCommand
    | ChunkCommand
    | ContentCommand
    | EndCommand
    | AllowCommand
)
AgentCommand = (
    SetUpCommand
    | HalfCommand
    | MomentCommand
    | AddPeerCommand
    | RemovePeerCommand
    | CountCommand
    | CloseCommand
)
ChangeAnswer = PhaseAnswer | ReleaseAnswer | QuarantineAnswer
AgentAnswer = ServesAnswer | CannotAnswer | ChangeAnswer | CountAnswer | LogAnswer

_half_commands: msgspec.msgpack.Decoder[HalfCommand] = msgspec.msgpack.Decoder(HalfCommand)


def frame_of(event: events.Event) -> bytes:
    """The frame of what an engine's handle asks. Raises InvalidRequest for an argument of a wrong type or
    size: at the agent it would be nonsense, which ends the link and all hand-offs."""
    try:
        frame = encode(half_command(event))
        _half_commands.decode(memoryview(frame)[HEAD.size :])
    except SegueError:
        raise
    except Exception as error:
        raise InvalidRequest(f"a wrong argument: {error}") from error
    return frame


def half_command(event: events.Event) -> HalfCommand:
    """The command for what an engine's handle asks. Raises AssertionError for an event that no engine
    posts."""
    match event:
        case events.ExpectRoom():
            return ExpectCommand(event)
        case events.OpenReceiver():
            return ReceiveCommand(event)
        case events.DeclineRoom():
            return DeclineCommand(event)
        case events.Publish():
            return PublishCommand(event)
        case events.SendChunk(ready=ready):
            return ChunkCommand(replace(event, ready=None), None if ready is None else ready.number)
        case events.SendMetadata():
            return ContentCommand(event)
        case events.EndRoom():
            return EndCommand(event)
        case events.AllowReplacement():
            return AllowCommand(event)
        case _:
            raise AssertionError(f"{type(event).__name__} is no call of an engine")


def change_answer(change: events.Change) -> ChangeAnswer:
    """The answer for what a manager reports."""
    match change:
        case events.Phase():
            return PhaseAnswer(change)
        case events.Release():
            return ReleaseAnswer(change)
        case events.Quarantined():
            return QuarantineAnswer(change)
