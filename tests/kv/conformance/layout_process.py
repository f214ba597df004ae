"""One side of pairs of layouts, in a process of its own: a `KVManager` over all ranks of a replica, for one
pair after the other. Orders come as lines of JSON, answers go out as such.

python layout_process.py prefill|decode shm|tcp
"""

from __future__ import annotations

import json
import queue
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from layouts import TOKENS, Sizes, image, page_ids
from segue.kv.config import HOST, KVConfig
from segue.kv.handles import Change, KVReceiver, KVSender
from segue.kv.ids import KVPoll, LeaderId, Role, Span, TransferId
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.ranks.local_rank import local_rank
from segue.kv.transport.memory.pool_memory import Memory, allocate

PATIENCE_S = 60.0


class Opened:
    """The ranks of one layout, what they hold, and their leader."""

    def __init__(self, role: Role, transport: str, kind: str, sizes: Sizes) -> None:
        self.kind, self.sizes = kind, sizes
        self.specs = sizes.ranks(kind, -(-TOKENS // sizes.page) + 3)
        self.pools: list[Memory] = [allocate(spec.nbytes) for spec in self.specs]
        self.changes: queue.Queue[Change] = queue.Queue()
        config = KVConfig(
            role=role,
            model="m",
            spec=self.specs[0],
            transports=[transport],
            limits=Limits(connect_s=PATIENCE_S, handshake_s=PATIENCE_S, peer_silence_s=PATIENCE_S),
        )
        ranks = [
            local_rank(replace(config, spec=spec), memory, HOST, index)
            for index, (spec, memory) in enumerate(zip(self.specs, self.pools, strict=True))
        ]
        self.manager = KVManager(config, ranks, self.changes.put)
        self.manager.start()
        self.me = config.me

    def images(self, first_token: int) -> list[Any]:
        """The content of each rank with the prompt from `first_token` on."""
        pages, first = page_ids(self.sizes, first_token), first_token // self.sizes.page * self.sizes.page
        span = Span(first_token, TOKENS)
        return [image(self.kind, spec, pages, first, span, TOKENS) for spec in self.specs]

    def wait(self, handle: KVSender | KVReceiver, phase: KVPoll) -> None:
        """Until the hand-off is there. Raises what it failed with."""
        while handle.poll() is not phase:
            if handle.error is not None:
                raise handle.error.exception()
            self.changes.get(timeout=PATIENCE_S)

    def send(self, transfer: TransferId, cut: int) -> dict[str, Any]:
        """Prefill's half: two chunks; the bytes that crossed the wire."""
        for memory, held in zip(self.pools, self.images(0), strict=True):
            memory.buffer[: len(held)] = held.tobytes()
        sender = self.manager.expect(transfer.sent_as, TOKENS, PATIENCE_S, decode=transfer.decode)
        self.wait(sender, KVPoll.WAITING_FOR_INPUT)
        pages = page_ids(self.sizes, 0)
        sender.send(Span(0, cut), pages)
        sender.send(Span(cut, TOKENS), pages, b"7")
        self.wait(sender, KVPoll.SUCCESS)
        return {"wire": sum(path.nbytes for path in self.manager.paths().values())}

    def receive(self, transfer: TransferId, prefix: int) -> dict[str, Any]:
        """Decode's half; the ranks that hold anything else than they must."""
        receiver = self.manager.receive(transfer.received_as, transfer.prefill, TOKENS, PATIENCE_S)
        self.wait(receiver, KVPoll.WAITING_FOR_INPUT)
        receiver.publish(page_ids(self.sizes, prefix), prefix)
        self.wait(receiver, KVPoll.SUCCESS)
        wrong = [
            rank
            for rank, (memory, due) in enumerate(zip(self.pools, self.images(prefix), strict=True))
            if not np.array_equal(np.frombuffer(memory.buffer, np.uint8, len(due)), due)
        ]
        return {"wrong": wrong}

    def close(self) -> None:
        """End all ranks."""
        self.manager.close()
        for memory in self.pools:
            memory.close()


def main(role: Role, transport: str) -> None:
    """Serve one order after the other until there are no more."""
    opened: Opened | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        match order["do"]:
            case "open":
                opened = Opened(role, transport, order["kind"], Sizes(*order["sizes"]))
                answer = {"me": msgspec.to_builtins(opened.me), "address": opened.manager.plane.address}
            case "meet" if opened is not None:
                opened.manager.add_peer(msgspec.convert(order["leader"], LeaderId), *order["address"])
            case "hand over" if opened is not None:
                transfer = msgspec.convert(order["transfer"], TransferId)
                if role is Role.PREFILL:
                    answer = opened.send(transfer, order["cut"])
                else:
                    answer = opened.receive(transfer, order["prefix"])
            case "close" if opened is not None:
                opened.close()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Role(sys.argv[1]), sys.argv[2])
