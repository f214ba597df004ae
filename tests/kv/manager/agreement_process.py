"""One rank of a real Gloo group, which does what the test tells it: a line of JSON in, a line of JSON out.

python agreement_process.py STORE_FILE RANK SIZE
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

from agreement_handles import receiver
from torch.distributed import FileStore

from segue.kv.agreement import Agreement
from segue.kv.errors import PeerLost, SegueError
from segue.kv.ids import KVPoll
from segue.kv.torch_group import TorchGroup


def polled(agreement: Agreement, rooms: list[list[Any]]) -> dict[str, Any]:
    """`rooms` are [room, phase, reason], polled in this order."""
    handles = {}
    for room, phase, reason in rooms:
        error = PeerLost(reason, room=room).info if reason else None
        handles[room] = receiver(room, KVPoll[phase], error)
    try:
        agreed = agreement.poll(handles)
    except SegueError as error:
        return {"error": error.info.code, "text": error.info.text}
    return {str(room): [a.phase.name, a.error.text if a.error else ""] for room, a in agreed.items()}


def answer(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = FileStore(path, size)
    answer("ready")
    agreements: dict[str, Agreement] = {}
    groups: dict[str, TorchGroup] = {}
    for line in sys.stdin:
        told = json.loads(line)
        if "ranks" in told:
            ranks = told["ranks"]
            group = TorchGroup(store, told["group"], ranks.index(rank), len(ranks), told["timeout_s"])
            groups[told["group"]], agreements[told["group"]] = group, Agreement(group)
            answer("made")
        elif "timeout_s" in told:  # from now on
            groups[told["group"]]._gloo._set_default_timeout(timedelta(seconds=told["timeout_s"]))
            answer("hurried")
        else:
            answer(polled(agreements[told["group"]], told["rooms"]))


if __name__ == "__main__":
    main()
