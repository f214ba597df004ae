"""A pair's choice over the real transports: shared memory, sockets, and libraries that are installed here."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import msgspec
import pytest
from test_conn_probe import choice_of, chosen_lines, met, transports_of
from test_manager import PAGES, Side, assert_at_rest, assert_handed_over, spec

from segue.kv import transport_negotiation as opening
from segue.kv.config import HOST
from segue.kv.errors import TransferFailed
from segue.kv.ids import RankId, Role
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.path_figures import PathChoice
from segue.kv.transport.base import Endpoint, EventSink, Transport, Written
from segue.kv.transport.kinds import KINDS, USABLE, TransportKinds
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.probe import SCRATCH_BYTES

pytestmark = pytest.mark.slow

NAMES = ("shm", "tcp", "nixl", "mooncake")
#: Nobody is late on a machine that is busy with other tests.
LIMITS = Limits(connect_s=60.0, peer_silence_s=30.0)
#: SmolLM2's pages, 720 KiB each.
SMOL = PoolSpec(
    shape=KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16", item_bytes=2),
    page_tokens=16,
    pages=PAGES,
    layer_count=30,
    head_count=3,
)


@cache
def here() -> tuple[str, ...]:
    """Those that work on this host, the preferred one first."""
    available = KINDS.available()
    return tuple(name for name in NAMES if available[name] == USABLE)


def changed(name: str, factor: float = 1.0, fails: bool = False, late: bool = False) -> type[Transport]:
    """The real transport `name`, that says of each write that it took `factor` times as long, that opens no
    path, or that begins its first write only when it is asked for the second."""
    kind = KINDS.kind(name)
    held: list[tuple[Any, ...]] = []
    writes = count()

    class Changed(kind):  # type: ignore[misc, valid-type]
        def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
            def told(event: Any) -> None:
                if isinstance(event, Written):
                    event = msgspec.structs.replace(event, seconds=event.seconds * factor)
                on_event(event)

            super().__init__(told, options)

        def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
            if fails:
                raise TransferFailed("it opens no path today")
            super().connect(peer, endpoint, timeout_s)

        def write(self, *write: Any) -> None:
            if late and next(writes) == 0:
                held.append(write)
                return
            while held:
                super().write(*held.pop())
            super().write(*write)

    return Changed


def chosen(
    caplog: pytest.LogCaptureFixture, kinds: dict[str, type[Transport]], pool: PoolSpec = SMOL
) -> PathChoice:
    """The choice of two leaders that offer all available transports, some of them changed; a hand-off goes
    over it."""
    runtime = replace(HOST, transports=TransportKinds({**KINDS.known, **kinds}))
    prefill, decode = (
        Side(
            role,
            spec=pool,
            memory=allocate(pool.nbytes + SCRATCH_BYTES),
            runtime=runtime,
            limits=LIMITS,
            transports=here(),
            scratch_bytes=SCRATCH_BYTES,
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    with chosen_lines(caplog) as lines, met(prefill, decode):
        line = lines.get(timeout=60)
        assert_handed_over(prefill, decode, 33, 8)
        choice = choice_of(prefill, decode)
        assert choice is not None
        assert transports_of(prefill, decode) == (choice.transport, choice.transport)
        assert f"transport={choice.transport}: {choice.describe()}" in line.getMessage()
        assert [one.transport for one in choice.candidates] == list(here())
        assert_at_rest(prefill)
        assert_at_rest(decode)
    return choice


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "EACH_S", 20.0)


@pytest.mark.parametrize("pool", [SMOL, spec()], ids=["large pages", "small pages"])
def test_the_one_that_measured_best_at_the_pairs_page_size_is_taken(
    pool: PoolSpec, caplog: pytest.LogCaptureFixture
) -> None:
    choice = chosen(caplog, {}, pool)
    page_bytes = 2 * pool.layer_count * pool.page_bytes
    needed = {
        one.transport: one.figures.page_s + 64 * page_bytes / one.figures.bytes_per_s
        for one in choice.candidates
        if one.figures is not None
    }
    assert list(needed) == list(here()), "each was measured"
    taken_s = needed[choice.transport]
    assert taken_s <= 1.5 * min(needed.values())
    assert choice.transport == here()[0] or needed[here()[0]] > 1.5 * taken_s, "it is preferred"


@pytest.mark.parametrize("best", NAMES)
def test_each_transport_is_taken_where_all_others_are_far_slower(
    best: str, caplog: pytest.LogCaptureFixture
) -> None:
    """So the figures that one is taken for are its own."""
    needs(best)
    choice = chosen(caplog, {name: changed(name, factor=1e5) for name in here() if name != best})
    assert choice.transport == best
    assert all(one.figures is not None for one in choice.candidates)


@pytest.mark.parametrize("late", NAMES)
def test_one_that_fails_stops_no_other_and_one_that_is_late_is_measured_again_and_taken(
    late: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(late)
    monkeypatch.setattr(opening, "EACH_S", 1.0)
    broken = here()[here().index(late) - 1]
    kinds = {name: changed(name, factor=1e5) for name in here()}
    kinds |= {broken: changed(broken, fails=True), late: changed(late, late=True)}
    choice = chosen(caplog, kinds)
    assert choice.transport == late
    for one in choice.candidates:
        assert (one.figures is None) == (one.transport == broken)
    assert f"{broken} it opens no path today" in choice.describe()


def needs(name: str) -> None:
    """Skip the test where the transport does not work."""
    if name not in here():
        pytest.skip(f"{name}: {KINDS.available()[name]}")
