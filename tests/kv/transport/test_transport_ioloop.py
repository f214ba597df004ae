"""The I/O loop of `shm` and `tcp`: which callback an event may reach, and when calls and timers run.

The property test turns the loop by hand, with real descriptors and a clock of its own, and compares each
callback with a model. Its programs are what callbacks do: watch, unwatch, close, open again under the same
number, post, arm and cancel timers.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segue.kv.transport.net.ioloop import IoLoop

IN, OUT = select.EPOLLIN, select.EPOLLOUT


class Turned(IoLoop):
    """A loop that the test turns, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__("turned", lambda _exc: None, clock=lambda: self.now)

    def turn(self) -> None:
        self.post(lambda: None)  # so that it does not wait
        self._turn(self._poller.poll(self._rest()))

    def end(self) -> None:
        self._poller.close()


@pytest.fixture
def loop() -> Iterator[Turned]:
    made = Turned()
    yield made
    made.end()


def signalled() -> int:
    """A descriptor that is ready to be read."""
    return os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def test_a_stale_event_does_not_reach_the_next_descriptor_of_the_same_number(loop: Turned) -> None:
    first, second = signalled(), signalled()
    reached: list[str] = []

    def replace(other: int) -> None:
        reached.append("first")
        loop.unwatch(first)
        loop.unwatch(other)
        os.close(other)
        silent = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        assert silent == other, "the kernel gives the lowest free number"
        loop.watch(silent, IN, lambda _events: reached.append("silent"))

    loop.watch(first, IN, lambda _events: replace(second))
    loop.watch(second, IN, lambda _events: replace(first))
    loop.turn()
    loop.turn()
    assert reached == ["first"]
    for fd in (first, second):
        loop.unwatch(fd)
        os.close(fd)


def test_who_is_watched_anew_in_a_batch_hears_in_the_next_one(loop: Turned) -> None:
    """Dropping an event that was collected before loses nothing."""
    first, second = signalled(), signalled()
    told: list[str] = []

    def again(other: int) -> None:
        told.append("first")
        for fd in (first, second):
            loop.unwatch(fd)
        loop.watch(other, IN, lambda _events: told.append("again"))

    loop.watch(first, IN, lambda _events: again(second))
    loop.watch(second, IN, lambda _events: again(first))
    loop.turn()
    assert told == ["first"]
    loop.turn()
    assert told == ["first", "again"]
    for fd in (first, second):
        loop.unwatch(fd)
        os.close(fd)


def test_what_is_not_asked_for_any_more_is_not_told(loop: Turned) -> None:
    first, second = signalled(), signalled()
    told: list[int] = []

    def narrow(other: int, events: int) -> None:
        told.append(events)
        loop.change(other, OUT)

    loop.watch(first, IN, lambda events: narrow(second, events))
    loop.watch(second, IN, lambda events: narrow(first, events))
    loop.turn()
    assert told == [IN]
    for fd in (first, second):
        loop.unwatch(fd)
        os.close(fd)


def test_a_descriptor_that_the_kernel_does_not_take_is_not_watched(loop: Turned, tmp_path: object) -> None:
    """epoll refuses a plain file: the caller hears of it, and closing it later does no harm."""
    plain = os.open(f"{tmp_path}/file", os.O_CREAT | os.O_RDWR)
    with pytest.raises(OSError):
        loop.watch(plain, IN, lambda _events: None)
    loop.unwatch(plain)
    os.close(plain)
    fd = signalled()
    loop.watch(fd, IN, lambda _events: None)
    with pytest.raises(FileExistsError):
        loop.watch(fd, IN, lambda _events: None)
    loop.turn()
    loop.unwatch(fd)
    os.close(fd)


def test_a_timer_further_away_than_epoll_can_count_waits(loop: Turned) -> None:
    ran: list[str] = []
    loop.later(10.0**9, lambda: ran.append("far"))
    near = loop.later(1.0, lambda: ran.append("near"))
    assert loop._next_timeout_s() == 1.0
    near.cancel()
    assert 0 < loop._next_timeout_s() < 2**31 / 1000
    loop.now += 10.0**9
    loop.turn()
    assert ran == ["far"]


def _stopped_by(loop: Turned, last: Callable[[], None]) -> None:
    """The effect of `stop` on the loop's own thread."""
    loop.inside = lambda: True  # type: ignore[method-assign]
    loop.stop(last, 1.0)


@pytest.mark.parametrize("where", ["event", "call", "timer"])
def test_nothing_runs_after_the_last_call(loop: Turned, where: str) -> None:
    ran: list[str] = []
    fds = [signalled(), signalled()]

    def stop() -> None:
        _stopped_by(loop, lambda: ran.append("last"))

    def event(_events: int) -> None:
        if not ran and where == "event":
            stop()
        elif where == "event":
            ran.append("event")

    for fd in fds:
        loop.watch(fd, IN, event)
    for what in ("call", "timer"):
        for turn in range(2):
            run = stop if (where, turn) == (what, 0) else lambda what=what: ran.append(what)  # type: ignore[misc]
            if what == "call":
                loop.post(run)
            else:
                loop.later(0.0, run)
    loop.turn()
    before = {"event": [], "call": [], "timer": ["call", "call"]}[where]
    assert ran == [*before, "last"]
    for fd in fds:
        os.close(fd)


def test_a_callback_that_raises_ends_the_loop_and_a_late_stop_runs_the_last_call(
    hooked: threading.Event,
) -> None:
    crashes: list[BaseException] = []
    loop = IoLoop("crashes", crashes.append)
    fd, ran = signalled(), []

    def bad(_events: int) -> None:
        raise KeyError("a bug")

    loop.start()
    loop.post(lambda: loop.watch(fd, IN, bad))
    assert hooked.wait(30)
    assert [type(exc) for exc in crashes] == [KeyError]
    loop.post(lambda: ran.append("dropped"))
    assert loop.stop(lambda: ran.append("last"), 30)
    assert ran == ["last"]
    os.close(fd)


# ---- the model -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Watched:
    """One registration, as the model knows it."""

    fd: int
    events: int
    turn: int
    told: int = 0
    changed: int = -1  # the turn in which other events were asked for last


@dataclass(eq=False)
class Armed:
    due: float
    order: int
    cancel: Callable[[], None]
    live: bool = True


@dataclass
class Model:
    """Runs a program at each callback, and says what the loop did that it must not."""

    loop: Turned
    programs: list[list[tuple[str, int]]]
    slots: list[int | None] = field(default_factory=lambda: [None] * 4)
    raised: dict[int, bool] = field(default_factory=dict)  # by number: is it ready to be read
    watched: dict[int, Watched] = field(default_factory=dict)
    at_poll: dict[Watched, int] = field(default_factory=dict)  # what the batch holds
    posted: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    timers: list[Armed] = field(default_factory=list)
    turn: int = 0
    count: int = 0

    def run_program(self) -> None:
        for what, n in self.programs.pop() if self.programs else []:
            getattr(self, what)(n)

    def open(self, n: int) -> None:
        if self.slots[n % 4] is None:
            fd = os.eventfd(n & 1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.slots[n % 4], self.raised[fd] = fd, bool(n & 1)
            if n & 2:
                self.watch(n)

    def close(self, n: int) -> None:
        if (fd := self.slots[n % 4]) is not None:
            self.unwatch(n)
            os.close(fd)
            self.slots[n % 4] = None

    def reopen(self, n: int) -> None:
        self.close(n)
        self.open(n | 2)

    def raise_(self, n: int) -> None:
        if (fd := self.slots[n % 4]) is not None and not self.raised[fd]:
            os.eventfd_write(fd, 1)
            self.raised[fd] = True

    def lower(self, n: int) -> None:
        if (fd := self.slots[n % 4]) is not None and self.raised[fd]:
            os.eventfd_read(fd)
            self.raised[fd] = False

    def watch(self, n: int) -> None:
        fd = self.slots[n % 4]
        if fd is None or fd in self.watched:
            return
        made = self.watched[fd] = Watched(fd, (IN, OUT, IN | OUT)[n % 3], self.turn)
        self.loop.watch(fd, made.events, lambda events: self.told(made, events))

    def unwatch(self, n: int) -> None:
        if (fd := self.slots[n % 4]) is not None:
            self.loop.unwatch(fd)
            self.watched.pop(fd, None)

    def rewatch(self, n: int) -> None:
        self.unwatch(n)
        self.watch(n)

    def change(self, n: int) -> None:
        if (fd := self.slots[n % 4]) in self.watched:
            assert fd is not None
            self.watched[fd].events = (IN, OUT, IN | OUT)[(n + 1) % 3]
            self.watched[fd].changed = self.turn
            self.loop.change(fd, self.watched[fd].events)

    def post(self, _n: int) -> None:
        self.count += 1
        self.posted.append(number := self.count)
        self.loop.post(lambda: self.called(number))

    def later(self, n: int) -> None:
        self.count += 1
        delay_s = (0.0, 1.0, 2.5, 0.5)[n % 4]
        timer = self.loop.later(delay_s, lambda: self.fired(armed))
        armed = Armed(self.loop.now + delay_s, self.count, timer.cancel)
        self.timers.append(armed)

    def cancel(self, n: int) -> None:
        if self.timers:
            armed = self.timers[n % len(self.timers)]
            armed.cancel()
            armed.live = False

    # What the loop does.

    def told(self, watch: Watched, events: int) -> None:
        assert self.watched.get(watch.fd) is watch, "an event of a registration that has ended"
        assert watch.turn < self.turn, "an event that is older than the registration"
        assert events & watch.events == events, "an event that nobody asks for"
        assert events & self.at_poll[watch] == events, "an event that did not happen"
        watch.told += 1
        self.run_program()

    def called(self, number: int) -> None:
        self.ran.append(number)
        self.run_program()

    def fired(self, armed: Armed) -> None:
        live = [timer for timer in self.timers if timer.live]
        assert armed in live, "a timer that was cancelled or has run"
        assert armed is min(live, key=lambda timer: (timer.due, timer.order)), "a nearer one waits"
        assert armed.due <= self.loop.now, "a timer that is not due"
        armed.live = False
        self.run_program()

    def step(self) -> None:
        """One turn, and whether all that was due has happened in it."""
        before = dict(self.watched)
        self.at_poll = {
            watch: watch.events & (OUT | (IN if self.raised[watch.fd] else 0)) for watch in before.values()
        }
        for watch in before.values():
            watch.told = 0
        self.turn += 1
        posted = len(self.posted)
        self.loop.turn()
        for fd, watch in before.items():
            # Events that were changed and changed back may have been unasked for when their time came.
            if self.watched.get(fd) is watch and watch.changed < self.turn:
                assert watch.told == bool(self.at_poll[watch]), "told once, if there was anything"
        assert self.ran == self.posted[: len(self.ran)], "calls run once and in order"
        assert len(self.ran) >= posted, "a call waits for another turn"
        live = [timer.due for timer in self.timers if timer.live]
        assert all(due > self.loop.now for due in live), "a timer is late"
        wait_s = self.loop._next_timeout_s()
        assert wait_s == (min(live) - self.loop.now if live else -1.0)


WHAT = ("open", "close", "reopen", "raise_", "lower", "watch", "unwatch", "rewatch", "change")
WHAT_ELSE = ("post", "later", "cancel")
STEP = st.tuples(st.sampled_from(WHAT * 2 + WHAT_ELSE), st.integers(0, 23))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    start=st.lists(STEP, min_size=4, max_size=16),
    programs=st.lists(st.lists(STEP, max_size=5), max_size=40),
    moves=st.lists(st.sampled_from((0.0, 0.5, 1.0)), min_size=3, max_size=8),
)
@example(  # one callback asks for other events of a descriptor, a later one of that turn for the first again
    start=[("open", 0), ("open", 0), ("reopen", 10), ("post", 0)],
    programs=[[("change", 6)], [("change", 2)]],
    moves=[0.0, 0.0, 0.0],
)
def test_the_loop_does_what_its_model_does(
    start: list[tuple[str, int]], programs: list[list[tuple[str, int]]], moves: list[float]
) -> None:
    loop = Turned()
    model = Model(loop, [*programs, [("open", n) for n in (2, 7, 8 + 2, 12 + 3)] + start])
    try:
        model.run_program()
        for move_s in moves:
            model.step()
            loop.now += move_s
            # Also between turns: the loop's thread is the only one that may.
            model.run_program()
    finally:
        for fd in model.slots:
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        loop.end()


def test_a_call_that_is_posted_while_the_loop_looks_for_calls_wakes_it(loop: Turned) -> None:
    """Between its last look and its sleep another thread posts: the sleep must end at once."""
    ran: list[int] = []

    class Looked(deque[Callable[[], None]]):
        def __len__(self) -> int:
            seen = super().__len__()
            if not ran:
                ran.append(0)
                loop.post(lambda: ran.append(1))
            return seen

    loop._calls = Looked()
    assert loop._rest() == 0.0 or loop._poller.poll(0.0)
    loop.turn()
    assert ran == [0, 1]
