"""Fixtures of all tests: `tls_files` importable from each package, the order of tests, and a log that is
restored."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from segue.server.instance.gc import frozen_imports

# How long an example takes says how busy the machine is: 0.2 s each, and 1 s to draw ten of them, are over
# when it stands still for a moment.
settings.register_profile("segue", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("segue")

#: Whole deployments: several processes each, some of them judged by how long a silence lasts.
DEPLOYMENTS = "tests/e2e/"
#: Files whose SGLang engines use the same ports.
SGLANG = tuple(f"tests/sglang_engines/test_sglang_{name}.py" for name in ("engines", "ranks", "router"))
#: Those that are killed, paused, cut off and overfilled while clients stream.
CHAOS = "tests/e2e/chaos/"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """torch, transformers and all test modules are imported here, and stay: half a million objects that each
    `gc.collect` of a test (hundreds) would go through again."""
    with frozen_imports():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own. A fixture that is an async context manager is
    entered there, and the test gets what it gives."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, value in given.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await test(**given)

    asyncio.run(run())
    return True


@pytest.fixture
def rig() -> Any:
    """The fleet of `tests/server/fleet` with its default settings; a test gets what `a_rig` gives."""
    from fleet_rig import a_rig

    return a_rig()


def pytest_itemcollected(item: pytest.Item) -> None:
    # `-m` on a command line replaces the expression of `addopts`: `-m 'not slow'` must not run the soak.
    if item.nodeid.startswith(CHAOS) or item.get_closest_marker("soak") is not None:
        item.add_marker(pytest.mark.slow)


#: Runs of many seeds, each as long as the tests of several files together.
SLICES = "tests/lab/sim/test_sim_slice.py::test_no_invariant_breaks_under_faults_in_more_seeds"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest tests run first, so that no worker is left with one when the others have ended."""
    items.sort(key=lambda item: not item.nodeid.startswith((DEPLOYMENTS, SLICES)))


class _Groups(LoadScopeScheduling):
    """Deployments run in one worker, one after the other, beside the other files in the other workers.
    SGLang's engines do, too.

    (`--dist loadgroup` groups nothing with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(DEPLOYMENTS):
            return DEPLOYMENTS
        if nodeid.startswith(SGLANG):
            return SGLANG[0]
        return nodeid if nodeid.startswith(SLICES) else nodeid.split("::", 1)[0]

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that ended its worker counts as run: another worker would be ended by it too."""
        work = [unit for unit in self.assigned_work[node].values() if not all(unit.values())]
        if not work:
            return super().remove_node(node)
        crashed = next(test for test, completed in work[0].items() if not completed)
        work[0][crashed] = True
        super().remove_node(node)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # the order above, and not by the number of tests
    return _Groups(config, log)


@pytest.fixture(autouse=True, scope="module")
def imports_stay_frozen() -> Iterator[None]:
    """Keep the frozen imports: without them every later collection of this process takes ten times as
    long."""
    before = gc.get_freeze_count()
    yield
    assert gc.get_freeze_count() >= before // 2, "call gc.freeze() after gc.unfreeze()"


#: Threads of a manager, of its transports and of what hashes: each ends with what started it.
THREADS = {"segue-io", "segue-digest", "segue-tcp", "segue-shm-io", "segue-shm-copy"}


@pytest.fixture(autouse=True, scope="module")
def threads_end() -> Iterator[None]:
    """A thread that a module leaves behind keeps its memory, its sockets and its event loop."""
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name in THREADS]
    until = time.monotonic() + 10
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    assert [t.name for t in left if t.is_alive()] == []


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A test that runs a command in this process configures its log: the next test must not write to it."""
    root, ours = logging.getLogger(), logging.getLogger("segue")
    level, handlers, our_level = root.level, root.handlers[:], ours.level
    yield
    root.setLevel(level)
    ours.setLevel(our_level)
    kept = [handler for handler in root.handlers if handler in handlers]
    root.handlers[:] = kept + [handler for handler in handlers if handler not in kept]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a thread has ended by an exception, which is no failure of this test."""
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _args: ended.set())
    return ended


@pytest.fixture
def own_handlers() -> Iterator[dict[signal.Signals, Any]]:
    """The interpreter's own handlers of SIGINT and SIGTERM, which asyncio gives back, are set meanwhile: a
    shell that has put the tests into the background has SIGINT ignored."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield own
    for number, handler in before.items():
        signal.signal(number, handler)
