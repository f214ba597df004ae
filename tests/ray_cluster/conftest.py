"""The cluster of a module, and the check that it leaves no process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import free_ports
from ray_hosts import RayHosts, until


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """A cluster; its application is the tests' to start."""
    made = RayHosts(tmp_path_factory.mktemp("ray"), free_ports(1)[0])
    try:
        yield made
    finally:
        made.close()
        until(lambda: not made.parts(), "the end of each segue process")
