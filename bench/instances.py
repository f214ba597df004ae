"""Parts that the benches of real instances share: starting them, a minimal frontend, one request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from segue.engine.request import Output, Request, SamplingParams
from segue.kv.errors import SegueError
from segue.kv.ids import LeaderId, Role, new_incarnation, new_room
from segue.kv.limits import Limits
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.node import SessionNode
from segue.server.messages.control import ControlMessage, Load, Outputs, Submit
from segue.server.messages.ticket import Ticket
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord

SEGUE = (sys.executable, "-m", "segue.cli.main")
ANSWER_S = 60.0
#: The room of a prompt that no decode comes for holds its pages so long.
ALONE_S = 10.0


class Outbox:
    """A frontend's handler; the outputs of the one request in flight go into a queue."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None: ...

    def opened(self, session: Session) -> None: ...

    def closed(self, session: Session, error: SegueError) -> None: ...

    def received(self, session: Session, message: object) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self.outputs.put_nowait(output)
        else:
            assert isinstance(message, Load)


@dataclass
class Front:
    """A frontend with a session to each instance, by the name that `connected` gave it."""

    handler: Outbox
    sessions: dict[str, Session]

    async def ask(
        self, name: str, prompt: Sequence[int], prefill: str, decode: str, tokens: int
    ) -> list[Output]:
        """Every output of one greedy request for exactly `tokens` tokens; none other may be in flight. One
        instance for both computes the prompt for a decode that does not come, and gives one token."""
        outputs: list[Output] = []
        await self.ask_each(name, prompt, prefill, decode, tokens, outputs.append)
        return outputs

    async def ask_each(
        self,
        name: str,
        prompt: Sequence[int],
        prefill: str,
        decode: str,
        tokens: int,
        hear: Callable[[Output], None],
    ) -> None:
        """As `ask`, and `hear` is called with each output as it comes."""
        pair = self.sessions[prefill], self.sessions[decode]
        ticket = Ticket(
            room=new_room(),
            attempt=0,
            prefill=pair[0].peer.leader,
            decode=pair[1].peer.leader,
            budget_s=ALONE_S if prefill == decode else ANSWER_S,
            ordinal=0 if prefill == decode else None,
        )
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        submit = Submit(Request(request_id=name, prompt=list(prompt), sampling=sampling), ticket)
        for session in pair[: 1 if prefill == decode else 2]:
            session.send(submit)
        while True:
            output = await asyncio.wait_for(self.handler.outputs.get(), ANSWER_S)
            assert output.error is None, output.error
            hear(output)
            if output.finish is not None:
                return


@asynccontextmanager
async def connected(
    port: int, wanted: dict[Role, int], name: Callable[[Role, InstanceRecord], str]
) -> AsyncIterator[Front]:
    """A frontend of the registry at `port`, once so many instances of each role are there."""
    limits = Limits()
    registry = RegistryClient(f"http://127.0.0.1:{port}", secret=None, limits=limits)
    handler = Outbox()
    node = SessionNode(
        me=LeaderId(new_incarnation()),
        role=Role.FRONTEND,
        secret=None,
        handlers=dict.fromkeys(Role, handler),
        message_type=ControlMessage,
        limits=limits,
    )
    sessions: dict[str, Session] = {}
    try:
        for role, count in wanted.items():
            async for records in registry.watch(role):
                if len(records) == count:
                    for record in records:
                        replica = record.replicas[0]
                        sessions[name(role, record)] = await node.connect(
                            replica.host, replica.port, expect=LeaderId(record.incarnation), timeout_s=10
                        )
                    break
        yield Front(handler, sessions)
    finally:
        await node.close()
        await registry.aclose()


def start(words: Sequence[str], program: Sequence[str] = SEGUE) -> subprocess.Popen[str]:
    """`segue WORDS`, once it says that it is ready."""
    process = subprocess.Popen([*program, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready"), f"{words[0]} did not start: {line!r}"
    return process


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ask all to leave, then wait for each."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(30)
