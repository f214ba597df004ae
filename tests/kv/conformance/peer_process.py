"""A transport in a process of its own: commands in and events out, one JSON object per line."""

from __future__ import annotations

import json
import os
import sys
import threading

import msgspec
import numpy as np
from conformance_tls import make_by_name

from segue.kv.errors import SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.spec import Plane
from segue.kv.transport.base import Endpoint, TransportEvent
from segue.kv.transport.memory.pool_memory import allocate

_lock = threading.Lock()


def say(**line: object) -> None:
    with _lock:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def sink(event: TransportEvent) -> None:
    fields = {k: getattr(event, k) for k in ("peer", "epoch", "tag", "proven") if k in event.__slots__}
    say(event=type(event).__name__, **msgspec.to_builtins(fields))


def main(name: str, me: RankId, nbytes: int) -> None:
    memory = allocate(nbytes)
    transport = make_by_name(name, sink, me)
    say(endpoint=msgspec.json.encode(transport.register(memory)).decode())
    for line in sys.stdin:
        command = json.loads(line)
        peer = msgspec.convert(command.get("peer"), RankId | None)
        match command["do"]:
            case "connect":
                try:
                    endpoint = msgspec.json.decode(command["endpoint"], type=Endpoint)
                    transport.connect(peer, endpoint, 60)
                    say(connect="ok")
                except SegueError as exc:
                    say(connect=str(exc))
            case "grant":
                area = Content((Plane(0, 1, 1, 1, 1, 1),), ((0, nbytes),))
                transport.grant(peer, command["epoch"], area)
                say(grant="ok")
            case "fence":
                transport.fence(peer, command["epoch"])
            case "fill":
                np.frombuffer(memory.buffer, np.uint8)[:] = command["byte"]
                say(fill="ok")
            case "write":
                block = CopyBlock(*command["block"])
                for tag in range(command.get("times", 1)):
                    transport.write(peer, command["epoch"], tag, [block])
                say(write="ok")
            case "count":
                say(count=int(np.count_nonzero(np.frombuffer(memory.buffer, np.uint8) == command["byte"])))
            case "vanish":
                os._exit(0)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=RankId), int(sys.argv[3]))
