"""The cost of a poll of symmetric ranks: `python bench/agreement.py [--polls 300]`.

The processes of one Gloo group on this machine, one thread each, poll the same rooms, each in an order of its
own. `keyed` is `Agreement.poll`; `positional` is one MIN over the phases in the order of the rank's list.
Each poll does both, one after the other. Microseconds on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time

import torch
from torch._C._distributed_c10d import FileStore

from recorded import commit, quantile
from segue.kv.agreement import Agreement
from segue.kv.clock import VirtualClock
from segue.kv.handles import Handles, KVSender
from segue.kv.ids import RoomKey
from segue.kv.protocol.events import Event
from segue.kv.torch_group import TorchGroup


class Owner(Handles):
    """The owner of handles that nothing happens to."""

    def __init__(self) -> None:
        super().__init__(VirtualClock())

    def post(self, *batch: Event) -> None: ...


def rank(store: str, number: int, size: int, polls: int) -> None:
    """One rank; rank 0 prints what it measured."""
    torch.set_num_threads(1)
    group = TorchGroup(FileStore(store, size), "bench", number, size, timeout_s=60)
    agreement = Agreement(group)
    owner = Owner()
    found = {}
    for count in (0, 10, 500, 5000):
        rooms = random.Random(count).sample(range(1, 2**62), count)
        random.Random(number).shuffle(rooms)
        handles = {room: KVSender(owner, RoomKey(room)) for room in rooms}
        times: dict[str, list[float]] = {"keyed": [], "positional": []}
        for _ in range(polls):
            began = time.perf_counter()
            agreement.poll(handles)
            between = time.perf_counter()
            group.least([handle.poll() for handle in handles.values()])
            times["keyed"].append((between - began) * 1e6)
            times["positional"].append((time.perf_counter() - between) * 1e6)
        found[str(count)] = {name: round(quantile(values, 0.5)) for name, values in times.items()}
    if number == 0:
        print(json.dumps(found))
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--polls", type=int, default=300)
    parser.add_argument("--rank", nargs=3, metavar=("STORE", "RANK", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank[0], int(args.rank[1]), int(args.rank[2]), args.polls)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, "--polls", str(args.polls), "--rank", f"{folder}/store"]
            ranks = [
                subprocess.Popen([*words, str(number), str(size)], stdout=subprocess.PIPE, text=True)
                for number in range(size)
            ]
            heard = [process.communicate()[0] for process in ranks]
        for count, row in json.loads(heard[0]).items():
            print(f"{size} ranks, {count:>4} rooms   p50 µs {row}   commit {commit()}")


if __name__ == "__main__":
    main()
