"""What the tests of several rooms share: `tls_files` importable from each, who runs beside whom, and a log
that is put back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.serve.collector import for_good

#: Whole deployments: several processes each, some of them judged by how long a silence lasts.
DEPLOYMENTS = Path(__file__).parent / "e2e"
#: Those that are killed, paused, cut off and overfilled while clients stream.
CHAOS = DEPLOYMENTS / "chaos"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """torch, transformers and all test modules are imported here, and stay: half a million objects that each
    `gc.collect` of a test (hundreds) would go through again."""
    with for_good():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deployments run in one worker, one after the other, beside what other workers compute by themselves."""
    for item in items:
        if item.path.is_relative_to(DEPLOYMENTS):
            item.add_marker(pytest.mark.xdist_group("deployments"))
        if item.path.is_relative_to(CHAOS):
            item.add_marker(pytest.mark.slow)


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
