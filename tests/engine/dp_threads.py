"""DP ranks that share out a model's experts, as threads of the test's process."""

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from segue.engine.cpu.cpu_forward import load_forward
from segue.engine.engine_api import run_step
from segue.engine.ranks.dp_forward import DpForward
from segue.engine.ranks.dp_group import DpGroup
from segue.engine.replica_engine import make_engine
from segue.kv.errors import SegueError
from segue.server.supervisor.dp_rank_processes import star


class DpRank:
    """One rank: its engine, and a leader's loop in small. `jobs` are run on the rank's thread; between two of
    them it steps along with the others. `lost` is why its group is over."""

    def __init__(self, folder, index, own, group, sampler):
        self.group, self.own = group, own
        self.forward = DpForward(own, group)
        self.engine = make_engine(folder, own, self.forward, sampler)
        self.inbox = queue.SimpleQueue()
        self.lost, self.steps_along = [], 0
        self.ended, self.leaves = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._serve, name=f"dp {index}")

    def start(self):
        self.group.listen(lambda: self.inbox.put(None), self.leaves.set, self._over)
        self.thread.start()

    def _over(self, error):
        self.lost.append(error)
        self.ended.set()

    def do(self, job):
        """Run `job(engine)` on the rank's thread; a future of what it returns."""
        done = queue.SimpleQueue()
        self.inbox.put((job, done))
        return done

    def _serve(self):
        while True:
            item = self.inbox.get()
            if item == "end":
                return
            if item is not None:
                job, done = item
                try:
                    done.put(job(self.engine))
                except SegueError as exc:
                    done.put(exc)
            while self.group.behind:
                self.steps_along += 1
                with contextlib.suppress(SegueError):  # it is in `lost`
                    run_step(self.engine, [])


class DpThreads:
    """`size` ranks that have met, each with what `sampler` makes. `timeout_s` is for what must not run out;
    an exchange may take `exchange_s`."""

    def __init__(
        self,
        folder,
        size,
        sampler,
        timeout_s=60.0,
        identity=lambda rank, own: own.fingerprint,
        limits=None,
        exchange_s=None,
    ):
        links, one_by_one = star(size), threading.Lock()

        def load(rank):
            with one_by_one:  # transformers loses tied weights where two threads load at once
                own = load_forward(folder, dtype="float32", pool_bytes=2**23, dp_rank=rank, dp_size=size)
            group = DpGroup(rank, size, links[rank], identity(rank, own), timeout_s, limits)
            try:
                group.meet(timeout_s)
            except SegueError:
                group.close()
                raise
            return DpRank(folder, rank, own, group, sampler())

        with ThreadPoolExecutor(size) as pool:
            self.ranks = list(pool.map(load, range(size)))
        for rank in self.ranks:
            if exchange_s is not None:
                rank.group._gloo._gloo._set_default_timeout(timedelta(seconds=exchange_s))
            rank.start()

    def __enter__(self):
        return self.ranks

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.inbox.put("end")
        for rank in self.ranks:
            rank.thread.join(60)
            assert not rank.thread.is_alive()
        for rank in self.ranks:
            rank.group.close()
            assert not rank.group._io.running
