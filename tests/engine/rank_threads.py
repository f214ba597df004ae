"""A replica of several ranks whose ranks are threads of the test's process."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import HashStore

from segue.engine.cpu.cpu_forward import load_forward
from segue.engine.ranks.collectives import join
from segue.engine.ranks.parallel_replica import RanksForward, serve_rank
from segue.engine.ranks.rank_orders import RankMessage
from segue.engine.replica_engine import make_engine
from segue.kv.ranks.rank_link import RankLink


def load_ranks(folder, size, exchange_s=60.0):
    """The forward of each rank; they have met, for which there was a minute, and compute together. An
    exchange may take `exchange_s`."""
    store, one_by_one = HashStore(), threading.Lock()

    def load(rank):
        place = join(size, rank, store, 60.0)
        for group in (place.tp, place.pp, place.cp):
            if group is not None:
                group._gloo._set_default_timeout(timedelta(seconds=exchange_s))
        with one_by_one:  # transformers loses tied weights where two threads load at once
            return load_forward(folder, dtype="float32", pool_bytes=2**23, place=place)

    with ThreadPoolExecutor(size.ranks) as pool:
        return list(pool.map(load, range(size.ranks)))


class RankThreads:
    """See the module's text. `between` sees each of the leader's frames before its rank, and may change it.
    `lost` is what the leader's forward gave up for, `died` what ended ranks, `told` what they heard unless
    they `refuse`, `signals` the moments that have come at them."""

    def __init__(self, folder, size, sampler, between=lambda frame: frame, timeout_s=60.0):
        self.forwards = load_ranks(folder, size, timeout_s)
        self.links, self.far, self.threads = [], [], []
        self.lost, self.died, self.told, self.signals = [], [], [], []
        self.refuse = None
        for rank, forward in enumerate(self.forwards[1:], 1):
            ours, theirs = socket.socketpair()
            self.links.append(RankLink(ours, f"rank {rank}", messages=RankMessage))
            far = RankLink(theirs, "the leader", messages=RankMessage)
            self.far.append(far)
            far.receive = lambda *_, receive=far.receive: between(receive())
            self.threads.append(threading.Thread(target=self._serve, args=(far, forward)))
        page_bytes = sum(forward.pool.spec.page_bytes for forward in self.forwards)
        self.forward = RanksForward(self.forwards[0], self.links, page_bytes, self.lost.append, timeout_s)
        self.engine = make_engine(folder, self.forwards[0], self.forward, sampler)
        for thread in self.threads:
            thread.start()

    def _serve(self, far, forward):
        try:
            serve_rank(far, forward, self._told, self.signals.append)
        except Exception as exc:
            self.died.append(exc)
        finally:
            far.close()

    def _told(self, words):
        if self.refuse is not None:
            raise self.refuse
        self.told.append(words)

    def close(self):
        for link in self.links:
            link.close()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
