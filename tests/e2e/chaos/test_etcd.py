"""Instances and a frontend that find each other by etcd, and serve on while it is away."""

from __future__ import annotations

from pathlib import Path

import etcd_faults
import pytest
from etcd_server import needs_etcd

pytestmark = pytest.mark.slow


@needs_etcd
def test_no_request_is_lost_while_etcd_is_killed_started_again_and_stopped(
    tiny: Path, tmp_path: Path
) -> None:
    outcome = etcd_faults.run(tmp_path, tiny, ("prefill-0", "decode-0"), requests=100, at_once=2)
    assert (outcome.errors, outcome.wrong) == ({}, 0)
    assert outcome.completed >= 100
    assert outcome.during > 0
