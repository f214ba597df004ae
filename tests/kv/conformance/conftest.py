from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import conformance_doubles
import pytest
from conformance_harness import Pair, PeerProcess, until
from conformance_tls import ON_DEVICE, TCP_TLS, make_files, remove_files

import library_double
from segue.kv.ids import RankId
from segue.kv.transport import mooncake
from segue.kv.transport.kinds import KINDS, USABLE

#: Transports of one kind share most of their code, so one of each kind runs every test. The others run
#: `SHORT`: bytes, refusals, each proof, the ends.
#:
#: | kind | every test | `SHORT`, every day | `SHORT`, slow |
#: |---|---|---|---|
#: | host copy | shm | | |
#: | stream | tcp | tcp+tls | |
#: | library | library, nixl (slow) | mori+double | mooncake, mori, ascend, ascend+double |
#: | staging | staged_shm | staged_tcp, staged_shm+device | staged_tcp+device |
#:
#: `library` and the doubles copy within one process: they have no test with another process. With staging,
#: those tests are slow. A gibibyte is a slow test of shm and tcp, and a soak test of the others.
WHOLE = frozenset({"shm", "tcp", library_double.NAME, "nixl", "staged_shm"})
SLOW = frozenset({"nixl", "mooncake", "mori", "ascend", "ascend+double", "staged_tcp" + ON_DEVICE})
SHORT = frozenset(
    {
        "test_one_range",
        "test_thousands_of_ranges",
        "test_an_epoch_that_was_not_granted_does_not_land",
        "test_lesson_06_a_late_write_after_an_abort_does_not_land",
        "test_lesson_07_an_epoch_ended_at_the_writer_starts_nothing",
        "test_a_wrong_key_is_refused",
        "test_another_version_or_transport_is_refused",
        "test_connect_is_idempotent_and_fails_when_nobody_listens",
        "test_cancel_in_flight_at_the_writer",
        "test_fence_in_flight_at_the_receiver",
        "test_close_of_the_writer_in_flight_is_a_proof_for_the_receiver",
        "test_close_of_the_receiver_in_flight_fails_the_writes",
        "test_a_fence_after_a_path_was_replaced_is_true_for_the_one_before",
        "test_close_is_idempotent_and_ends_everything",
        "test_lesson_09_the_next_peer_of_the_same_name_works",
        "test_writes_from_another_process",
        "test_writes_into_another_process",
        "test_a_writer_killed_in_mid_write",
        "test_lesson_06_a_writer_killed_while_the_reader_stands_still",
    }
)
DOUBLES = (library_double.NAME, *conformance_doubles.DOUBLES)


def marks(name: str, test: str, *, processes: bool) -> list[pytest.MarkDecorator]:
    """When `test` runs for the transport `name`."""
    kind = "tcp" if name == TCP_TLS else name.removesuffix(ON_DEVICE)
    if name not in DOUBLES and (reason := KINDS.available()[kind]) != USABLE:
        return [pytest.mark.skip(f"{name}: {reason}")]
    if test == "test_one_gibibyte" and name not in ("shm", "tcp"):
        return [pytest.mark.soak]
    staged = name.startswith("staged_")
    slow = name in SLOW or (staged and (processes or test == "test_64_mebibytes"))
    return [pytest.mark.slow] if slow else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that takes `name` the transports of the table above."""
    if "name" not in metafunc.fixturenames:
        return
    test, processes = metafunc.function.__name__, "peer" in metafunc.fixturenames
    moving = [name for name in KINDS.known if KINDS.kind(name).moves_bytes]
    staged = [name + ON_DEVICE for name in moving if name.startswith("staged_")]
    names = [*moving, *staged, TCP_TLS, *(() if processes else DOUBLES)]
    metafunc.parametrize(
        "name",
        [
            pytest.param(name, marks=marks(name, test, processes=processes))
            for name in names
            if name in WHOLE or test in SHORT
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
    held = {str(sock.fileno()) for sock in mooncake.HELD}  # until this process ends
    assert {fd: file for fd, file in _descriptors().items() if fd not in held} == {
        fd: file for fd, file in descriptors.items() if fd not in held
    }
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
