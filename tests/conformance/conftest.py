from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from conformance_harness import Pair, PeerProcess, until
from conformance_tls import TCP_TLS, make_files, remove_files

from segue.core.types import RankId
from segue.transport.kinds import KINDS, OK


def marks(name: str, reason: str, test: str) -> list[pytest.MarkDecorator]:
    """Why `test` does not run now for the transport `name`, if it does not."""
    if reason != OK:
        return [pytest.mark.skip(f"{name}: {reason}")]
    if name != TCP_TLS and not KINDS.kind(name).moves_bytes:
        return [pytest.mark.skip(f"{name} moves no bytes")]
    # A gibibyte under TLS takes ten times as long, and shows nothing that 64 MiB do not.
    return [pytest.mark.soak] if (name, test) == (TCP_TLS, "test_one_gibibyte") else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that takes `name` runs for every transport; one that cannot work here says why."""
    if "name" in metafunc.fixturenames:
        reasons = KINDS.available()
        reasons[TCP_TLS] = reasons["tcp"]
        metafunc.parametrize(
            "name",
            [
                pytest.param(name, marks=marks(name, reasons[name], metafunc.function.__name__))
                for name in (*KINDS.known, TCP_TLS)
            ],
        )


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """Files for `tcp+tls`."""
    make_files()
    yield
    remove_files()


def _descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test: no thread, no descriptor and no mapping of a pool more than before."""
    gc.collect()
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    gc.collect()
    until(lambda: set(threading.enumerate()) <= threads, f"threads left: {threading.enumerate()}")
    assert _descriptors() == descriptors
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert not [line for line in maps if "memfd:segue" in line]


@pytest.fixture
def pair(name: str) -> Iterator[Callable[..., Pair]]:
    """Makes connected pairs of the transport and closes them."""
    pairs: list[Pair] = []

    def make(nbytes: int, target_bytes: int | None = None) -> Pair:
        pairs.append(Pair(name, nbytes, target_bytes))
        return pairs[-1]

    yield make
    for made in pairs:
        made.close()


@pytest.fixture
def peer(name: str) -> Iterator[Callable[[RankId, int], PeerProcess]]:
    """Starts processes that hold the other side, and ends them."""
    peers: list[PeerProcess] = []

    def start(me: RankId, nbytes: int) -> PeerProcess:
        peers.append(PeerProcess(name, me, nbytes))
        return peers[-1]

    yield start
    for made in peers:
        made.close()
