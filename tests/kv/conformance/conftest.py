from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Collection, Iterator

import conformance_doubles
import pytest
from conformance_harness import Pair, PeerProcess, until
from conformance_tls import ON_DEVICE, TCP_TLS, make_files, remove_files

import library_double
from segue.kv.ids import RankId
from segue.kv.transport.kinds import KINDS, USABLE
from segue.kv.transport.library.library_transport import LibraryTransport


def marks(name: str, reason: str, test: str, fixtures: Collection[str] = ()) -> list[pytest.MarkDecorator]:
    """Why `test` does not run now for the transport `name`, if it does not."""
    if reason != USABLE:
        return [pytest.mark.skip(f"{name}: {reason}")]
    if name in conformance_doubles.DOUBLES:
        if why := conformance_doubles.without(name, test, list(fixtures)):
            return [pytest.mark.skip(f"{name}: {why}")]
        # One of the three is enough for every day; `test_transport_vendors` has what differs.
        return [] if name == "mori+double" else [pytest.mark.slow]
    if name == library_double.NAME:
        if "peer" in fixtures:
            return [pytest.mark.skip("the double copies within one process")]
        return [pytest.mark.soak] if test == "test_one_gibibyte" else []
    if name.startswith("staged_"):
        return _staged_marks(name, test, fixtures)
    if name != TCP_TLS and not KINDS.kind(name).moves_bytes:
        return [pytest.mark.skip(f"{name} moves no bytes")]
    if name != TCP_TLS and issubclass(KINDS.kind(name), LibraryTransport):
        return [pytest.mark.slow]
    # A gibibyte under TLS takes ten times as long, and shows nothing that 64 MiB do not.
    return [pytest.mark.soak] if (name, test) == (TCP_TLS, "test_one_gibibyte") else []


def _staged_marks(name: str, test: str, fixtures: Collection[str]) -> list[pytest.MarkDecorator]:
    """Every day one of host memory and one of a device's; the rest, large tests and those of two processes in
    the slow tests."""
    if test == "test_one_gibibyte":
        return [pytest.mark.soak]
    daily = name in ("staged_tcp", "staged_shm" + ON_DEVICE) and "peer" not in fixtures
    daily = daily and test != "test_64_mebibytes"
    return [] if daily else [pytest.mark.slow]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that takes `name` runs for every transport; one that cannot work here says why."""
    if "name" in metafunc.fixturenames:
        reasons = KINDS.available()
        staged = [name + ON_DEVICE for name in KINDS.known if name.startswith("staged_")]
        reasons[TCP_TLS] = reasons["tcp"]
        reasons |= {name: reasons[name.removesuffix(ON_DEVICE)] for name in staged}
        doubles = (library_double.NAME, *conformance_doubles.DOUBLES)
        reasons |= dict.fromkeys(doubles, USABLE)
        test, fixtures = metafunc.function.__name__, metafunc.fixturenames
        metafunc.parametrize(
            "name",
            [
                pytest.param(name, marks=marks(name, reasons[name], test, fixtures))
                for name in (*KINDS.known, *staged, TCP_TLS, *doubles)
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
    conformance_doubles.reset()
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
