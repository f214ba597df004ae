# ruff: noqa: T201
"""A check of the simulator: it must notice each of a few sabotages of the hand-off.

    .venv/bin/python tools/mutants.py [--seeds N] [--only NAME …] [--jobs N] [--json FILE]

Each takes effect over several nodes and in time: proofs, leases, incarnations, losses, several leaders.
Unit tests judge what a single node shows, with sabotages that `sabotage.py` derives. Each sabotage is applied
to a temporary copy of `src`; the working tree is never touched. The simulator runs seeds until one breaks an
invariant. Exit status 1 if a sabotage survives, or if the unchanged code does not pass the same seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text that occurs once in a file below `src/segue`, what replaces it, and what that breaks."""

    name: str
    file: str
    old: str
    new: str
    why: str


MUTANTS = (
    Mutant(
        "unproven fence is a proof",
        "kv/protocol/tally.py",
        "        if proven:\n            self.unproven.discard(asked)",
        "        self.unproven.discard(asked)",
        "the answer to a fence is taken as a proof, whatever it says",
    ),
    Mutant(
        "Drained before the fence",
        "kv/protocol/sender.py",
        "            self.fence()\n            return super().end(error, end)",
        "            self.fence()\n            self.send(Drained(self.transfer))\n"
        "            return super().end(error, end)",
        "prefill promises that no write runs before it knows",
    ),
    Mutant(
        "source pages not leased while written",
        "kv/protocol/sender.py",
        "        if self.lease is Lease.PUBLISHED:",
        "        if False:",
        "a failing sender forgets that the transport still reads its pages",
    ),
    Mutant(
        "announced before it landed",
        "kv/protocol/sender.py",
        "while queue and queue[0].whole and not queue[0].in_flight and queue[0].summed:",
        "while queue and queue[0].whole and queue[0].summed:",
        "a chunk is announced when another one has landed",
    ),
    Mutant(
        "epochs start again",
        "kv/protocol/exchange.py",
        "        self._last_epoch += 1\n",
        "",
        "an epoch is used for two hand-offs",
    ),
    Mutant(
        "pages released at the abort",
        "server/schedulers/decode.py",
        "            entry.handle.abort(error)",
        "            entry.handle.abort(error)\n            self.pool.release(state.pages)\n"
        "            state.pages = []",
        "decode takes its pages back before the peer has let go",
    ),
    Mutant(
        "the end of a hand-off in flight is lost",
        "server/instance/leader.py",
        "        for change in waiting:\n            self._handle(change)\n",
        "",
        "what had to wait for the forward is forgotten after it",
    ),
    Mutant(
        "a leader turns by what it held before",
        "server/instance/leader.py",
        "                    if self.scheduler.drained:\n",
        "                    if True:\n",
        "an operator's order comes after another one has resumed the leader, and requests lose their memory",
    ),
    Mutant(
        "a continuation starts again",
        "server/balance/attempts.py",
        "            output=list(self.output),\n",
        "            output=[],\n",
        "the tokens that the client has are forgotten",
    ),
    Mutant(
        "a pair is retried before its first half was ended",
        "server/fleet/call.py",
        "        self.end(error.info, *([self.route.prefill] if kept else []))\n",
        "        if kept:\n            self.end(error.info, self.route.prefill)\n"
        "        else:\n            self._leave(*self.route.replicas)\n",
        "the half that did not fail runs on until its deadline",
    ),
    Mutant(
        "a silent frontend will be back",
        "server/instance/frontend_sessions.py",
        "            if self.deliver is not None:\n                self.deliver(FrontendGone",
        '            if self.deliver is not None and "silent" not in error.info.text:\n'
        "                self.deliver(FrontendGone",
        "only a connection that breaks ends what its frontend asked for",
    ),
    Mutant(
        "a frontend's end that broke is lost",
        "server/instance/leader.py",
        "                    self.scheduler.frontend_gone(origin, reason, now)\n",
        "                    pass\n",
        "what a dead frontend asked for is generated to its end (this was a bug)",
    ),
    Mutant(
        "a Replace that broke is lost",
        "server/instance/leader.py",
        "                case FromFrontend(origin, (Replace() | Cancel()) as message):\n"
        "                    self.scheduler.broken(",
        "                case FromFrontend(origin, Cancel() as message):\n"
        "                    self.scheduler.broken(",
        "prefill's half waits for a decode that it was not told of",
    ),
    Mutant(
        "a link is keyed without its DP rank",
        "kv/protocol/exchange.py",
        "            self.links.get(peer),\n",
        "            next((x for w, x in self.links.items() if w.incarnation == peer.incarnation), None),\n",
        "any session with the incarnation will do",
    ),
    Mutant(
        "one leader that leaves says it for all",
        "server/registry/registry_store.py",
        "        if entry.deserted:\n            self._remove(leader",
        "        if True:\n            self._remove(leader",
        "an instance leaves as a whole",
    ),
    Mutant(
        "bind before check",
        "kv/protocol/rooms.py",
        "        if machine is None:\n            return\n        room.state, room.machine",
        "        if machine is None:\n            return self._close(room, self._over(room))\n"
        "        room.state, room.machine",
        "the first that comes has the room, right or wrong",
    ),
    Mutant(
        "replace by number",
        "kv/protocol/rooms.py",
        "            self._await_word(room, peer, message)\n        else:\n",
        "            self._await_word(room, peer, message)\n"
        "            self.place(PlaceRoom(room.key, message.transfer.attempt, peer))\n        else:\n",
        "a later attempt ends the one before, though nobody says so",
    ),
    Mutant(
        "Gone while draining",
        "kv/protocol/exchange.py",
        "            if not self.tell(machine, message) and kind is Destination:\n"
        '                self.counters["repeats"] += 1\n',
        "            if not self.tell(machine, message):\n                self._tombstones.received(event)\n",
        "prefill says that it knows no such hand-off while its writes run",
    ),
    Mutant(
        "tombstone after the answer",
        "kv/protocol/rooms.py",
        "        self._tombstones.add_unopened(transfer, error, ended_by_peer=True)\n"
        "        self._turn.emit(Send(peer, Failed(transfer, error)))\n",
        "        self._turn.emit(Send(peer, Failed(transfer, error)))\n",
        "a destination that was refused may come again",
    ),
    Mutant(
        "park after close",
        "kv/protocol/rooms.py",
        "            self._refuse(peer, message.transfer, room.error or self._taken(room, message))\n",
        "            self._early(room, peer, message)\n",
        "a destination waits for a room that is over",
    ),
    Mutant(
        "replay without the metadata",
        "kv/protocol/rooms.py",
        "        for event in (*sent, room.partial, room.metadata):",
        "        for event in (*sent, room.partial):",
        "the second decode waits for its first token",
    ),
    Mutant(
        "two redirects",
        "kv/protocol/receptions.py",
        "if open_rank and not reception.moved and instance",
        "if open_rank and instance",
        "prefill may send decode from rank to rank",
    ),
    Mutant(
        "a replaced attempt commits late",
        "kv/protocol/rooms.py",
        "        if room.failed is not None and room.failed.attempt < event.attempt:\n"
        "            room.failed = None\n",
        "",
        "the room ends by the commit of an attempt of which the placer takes nothing",
    ),
    Mutant(
        "bind before the placer's word",
        "kv/protocol/rooms.py",
        "        if opened.decode not in (None, peer):\n",
        "        if opened.retain_s is None and opened.decode not in (None, peer):\n",
        "a retained room that was placed for one decode is for any later attempt",
    ),
    Mutant(
        "a grant that is not withdrawn",
        "kv/protocol/receiver.py",
        "        if self.fences.waiting or self.tally.unverified:",
        "        if (self.fences.waiting and not self.peer_done) or self.tally.unverified:",
        "decode uses pages again that its own ranks still let others write",
    ),
    Mutant(
        "written before it is copied",
        "kv/transport/staged/staged_in.py",
        "        self._host.copy_in(blocks, piece.slot, partial(self._copied, piece))\n\n"
        "    def _copied(self, piece: InPiece, error: SegueError | None) -> None:\n"
        "        if isinstance(error, CopyMayRun):  # the piece stays `COPYING`, with its slot and its "
        "fence\n"
        "            self.end(error)\n"
        "            return\n"
        "        self._free(piece)\n"
        "        if error is not None:\n"
        "            self.end(error)\n"
        "        elif self.over is None:\n"
        "            self.stream.send(wire.PieceCopied(piece.number))\n",
        "        self._host.copy_in(blocks, piece.slot, partial(self._copied, piece))\n"
        "        self.stream.send(wire.PieceCopied(piece.number))\n\n"
        "    def _copied(self, piece: InPiece, error: SegueError | None) -> None:\n"
        "        if isinstance(error, CopyMayRun):\n"
        "            self.end(error)\n"
        "            return\n"
        "        self._free(piece)\n"
        "        if error is not None:\n"
        "            self.end(error)\n",
        "a write has landed when its slot is full",
    ),
    Mutant(
        "a fence that copies outlive",
        "kv/transport/staged/staged_in.py",
        "        copying = any(p.epoch == epoch and p.state is _S.COPYING for p in self.pieces.values())\n",
        "        copying = False\n",
        "decode's fence is answered while its own threads still write the pages",
    ),
    Mutant(
        "a fence that copies out outlive",
        "kv/transport/write_book.py",
        "        if epoch in self._fences and epoch not in self.still_read and not self.busy(epoch):\n",
        "        if epoch in self._fences and epoch not in self.still_read:\n",
        "prefill's fence is answered while its pages are still read",
    ),
    Mutant(
        "a slot that is not given back",
        "kv/transport/staged/staged_out.py",
        "            else:\n                self._host.out_slots.give(piece.slot)\n"
        "            self._give_up(number)\n",
        "            self._give_up(number)\n",
        "each fence in the middle of a copy costs a slot",
    ),
    Mutant(
        "a slot is given on while it is written",
        "kv/transport/staged/staged_in.py",
        "        if piece.state is _S.QUARANTINED and piece.fenced and piece.settled:\n",
        "        if piece.state is _S.QUARANTINED and piece.fenced:\n",
        "a fence of shm that proves nothing frees a slot",
    ),
    Mutant(
        "slots of paths that broke",
        "kv/transport/staged/staged_transport.py",
        "            old.replaced()\n",
        "",
        "a path that breaks costs slots until the writer's process has ended (this was a bug)",
    ),
    Mutant(
        "a piece behind a fence ends its path",
        "kv/transport/staged/staged_in.py",
        "        if (self.peer, piece.epoch) not in self._host.grants:  # a fence has",
        "        if False:  # a fence has",
        "the end of one hand-off breaks all others of its pair (this was a bug)",
    ),
    Mutant(
        "written before it is ready",
        "kv/ranks/local_rank.py",
        "        if ready is not None and not ready.over:\n            self._hold(ready, epoch",
        "        if ready is not None and ready.number < 0:\n            self._hold(ready, epoch",
        "KV leaves before the forward has stored it",
    ),
    Mutant(
        "hashed before it is ready",
        "kv/ranks/local_rank.py",
        "        elif effect.ready.over:\n",
        "        elif effect.ready.number >= 0:\n",
        "a checksum is of what lay in the pages before",
    ),
    Mutant(
        "a fence that leaves what waits",
        "kv/ranks/local_rank.py",
        "        self._drop(transport, peer, epoch)\n        self._by_name",
        "        self._by_name",
        "checksums of a hand-off that is over wait for KV that may never be ready",
    ),
    Mutant(
        "each side its own checksum",
        "kv/peers.py",
        "        if kind in prefill.checksums and kind in decode.checksums:\n",
        "        if kind in prefill.checksums:\n",
        "prefill alone decides which checksum both compute",
    ),
)

#: Runs in the copy: the number of each seed as it begins, until one fails, then one line of JSON. A sabotage
#: that makes a seed endless is caught by the CPU time it took, which a busy machine does not change.
HUNT = """
import json, resource, sys, time, segue
from segue_lab.sim.run import load, run_scenario
assert segue.__file__.startswith(sys.argv[1]), segue.__file__
first, count = int(sys.argv[2]), int(sys.argv[3])
hand_offs = 0
for index in range(count):
    print(index + 1, flush=True)
    end_s = int(time.process_time()) + int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    outcome = run_scenario(load(first + index))
    hand_offs += outcome.counts.get("hand-offs", 0)
    if outcome.failed:
        print(json.dumps([index + 1, hand_offs, outcome.rule, outcome.text[:160]]))
        break
else:
    print(json.dumps([0, hand_offs, "", ""]))
"""


@dataclass(frozen=True, slots=True)
class Catch:
    """How many seeds and hand-offs it took; `seeds` 0 means that nothing noticed."""

    seeds: int
    hand_offs: int
    rule: str
    text: str


def apply(source: Path, mutant: Mutant) -> None:
    """Change the one place that `mutant` names. ValueError if it is not there exactly once."""
    path = source / "segue" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))


def hunt(mutant: Mutant | None, first: int, seeds: int, cpu_s: int) -> Catch:
    """Run seeds over a copy of the code with `mutant` in it, until one fails or takes `cpu_s` of CPU time."""
    with tempfile.TemporaryDirectory(prefix="segue-mutant-") as folder:
        source = Path(folder) / "src"
        for code in (ROOT / "src", ROOT / "lab"):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(code, source, ignore=ignored, dirs_exist_ok=True)
        if mutant is not None:
            apply(source, mutant)
        words = [sys.executable, "-c", HUNT, str(source), str(first), str(seeds), str(cpu_s)]
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        said = done.stdout.split("\n")
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Catch(int(said[-2]), 0, "hang", f"no end within {cpu_s} s of CPU time")
        if done.returncode != 0:
            raise RuntimeError(f"the hunt itself failed:\n{done.stderr[-2000:]}")
        return Catch(*json.loads(said[-2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=400, help="how many seeds a sabotage may survive")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="only sabotages whose name contains one of these"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cpu-s", type=int, default=60, help="CPU time for one seed, in seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    mutants = [m for m in MUTANTS if any(part in m.name for part in args.only)]

    def work(mutant: Mutant | None) -> Catch:
        return hunt(mutant, args.first, args.seeds, args.cpu_s)

    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(work, mutants)
        found: dict[str, Catch] = {}
        for mutant, catch in zip(mutants, results, strict=True):
            found[mutant.name] = catch
            shown = f"{catch.seeds:4d} seeds  [{catch.rule}]" if catch.seeds else " SURVIVED    "
            print(f"{shown:<24} {mutant.name}: {mutant.why}", flush=True)
    longest = max((c.seeds for c in found.values()), default=0)
    sound = hunt(None, args.first, longest, args.cpu_s)
    survivors = [name for name, catch in found.items() if not catch.seeds]
    caught = [c.seeds for c in found.values() if c.seeds]
    if caught:
        median = statistics.median(caught)
        print(
            f"{len(caught)} of {len(found)} caught; seeds to catch one: median {median:g}, most {max(caught)}"
        )
    if sound.seeds:
        print(f"the unchanged code fails too, at seed {args.first + sound.seeds - 1}: {sound.text}")
    if survivors:
        print(f"survived: {', '.join(survivors)}")
    if args.json:
        report = {name: [c.seeds, c.hand_offs, c.rule, c.text] for name, c in found.items()}
        args.json.write_text(json.dumps({"mutants": report, "median": statistics.median(caught)}, indent=1))
    return 1 if survivors or sound.seeds else 0


if __name__ == "__main__":
    sys.exit(main())
