"""What the tests of several rooms share: `tls_files` importable from each, who runs beside whom, and a log
that is put back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from segue.serve.gc import frozen_imports

#: Whole deployments: several processes each, some of them judged by how long a silence lasts.
DEPLOYMENTS = "tests/e2e/"
#: Those that are killed, paused, cut off and overfilled while clients stream.
CHAOS = "tests/e2e/chaos/"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """torch, transformers and all test modules are imported here, and stay: half a million objects that each
    `gc.collect` of a test (hundreds) would go through again."""
    with frozen_imports():
        return (yield)


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.startswith(CHAOS):
        item.add_marker(pytest.mark.slow)


class _Groups(LoadScopeScheduling):
    """Deployments run in one worker, one after the other, beside the other files in the other workers.

    (`--dist loadgroup` groups nothing with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return DEPLOYMENTS if nodeid.startswith(DEPLOYMENTS) else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _Groups(config, log)


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
