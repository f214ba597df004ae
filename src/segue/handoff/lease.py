"""The lease that a hand-off holds on its pages: who may touch them, and when that ends.

It hangs on the machine object and nowhere else. Ending it twice, or ending published pages without
completion or proof, raises: such a bug must not become a wrong token.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from segue.core.errors import Internal


class LeaseState(enum.StrEnum):
    """Who may touch the pages."""

    HELD = "HELD"
    PUBLISHED = "PUBLISHED"
    QUARANTINED = "QUARANTINED"
    RELEASED = "RELEASED"


class LeaseStep(enum.StrEnum):
    """What moves a lease on."""

    PUBLISH = "published, or first write posted"
    COMPLETE = "every planned write landed"
    FAIL = "failed"
    PROOF = "fence proven"
    UNUSED = "never published"


LEASE_TABLE: Mapping[LeaseState, Mapping[LeaseStep, LeaseState]] = {
    LeaseState.HELD: {
        LeaseStep.PUBLISH: LeaseState.PUBLISHED,
        LeaseStep.UNUSED: LeaseState.RELEASED,
    },
    LeaseState.PUBLISHED: {
        LeaseStep.COMPLETE: LeaseState.RELEASED,
        LeaseStep.FAIL: LeaseState.QUARANTINED,
    },
    LeaseState.QUARANTINED: {LeaseStep.PROOF: LeaseState.RELEASED},
    LeaseState.RELEASED: {},
}


class Lease:
    """The lease of one hand-off. `pages` counts what a peer (or the transport) may touch."""

    __slots__ = ("pages", "state")

    def __init__(self) -> None:
        self.state = LeaseState.HELD
        self.pages = 0

    def publish(self, pages: int) -> None:
        """From now on somebody else may touch `pages` pages."""
        self._go(LeaseStep.PUBLISH)
        self.pages = pages

    def end(self, step: LeaseStep) -> None:
        """Move towards the end. Raises Internal where the table has no such step: released twice,
        or released while a peer may still write."""
        self._go(step)

    def _go(self, step: LeaseStep) -> None:
        after = LEASE_TABLE[self.state].get(step)
        if after is None:
            raise Internal(f"a lease that is {self.state} cannot be ended or changed by '{step}'")
        self.state = after
