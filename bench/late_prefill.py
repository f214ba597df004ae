"""`segue` with an engine that tells of the KV of every other sequence only when its forward has ended.

Started by `bench/handoff.py --late-half`, for a comparison within one run. Sequences count from 1 and
only the benchmark's requests arrive, one at a time: the late ones are its first, third, fifth and so on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

from segue.cli.main import main
from segue.engine.engine_api import OnStored, SequenceStep, StepHandle
from segue.engine.replica_engine import ReplicaEngine

launch = ReplicaEngine.launch


def late_or_not(
    self: ReplicaEngine, steps: Sequence[SequenceStep], on_stored: OnStored, on_ready: Callable[[], None]
) -> StepHandle:
    return launch(self, steps, _nothing if steps[0].seq_id % 2 else on_stored, on_ready)


def _nothing(seq_ids: Collection[int], layers: int | None = None) -> None:
    """Tell nobody."""


if __name__ == "__main__":
    ReplicaEngine.launch = late_or_not  # type: ignore[method-assign]
    sys.exit(main())
