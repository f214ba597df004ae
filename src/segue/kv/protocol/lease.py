"""The access to a hand-off's pages, and its end.

The state of a machine determines it (`Machine.STATES`); there is no second record. A test compares every row
of both machines' tables with `LEASE_TABLE`: shared pages become free only by completion or proof, and
`RELEASED` is final.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Lease(enum.StrEnum):
    """The access to a hand-off's pages. `HELD`: their engine only. `PUBLISHED`: also the peer, or our own
    transport. `QUARANTINED`: these possibly still, although the hand-off has failed. `RELEASED`: the engine
    only."""

    HELD = "HELD"
    PUBLISHED = "PUBLISHED"
    QUARANTINED = "QUARANTINED"
    RELEASED = "RELEASED"


LEASE_TABLE: Mapping[Lease, Mapping[str, Lease]] = {
    Lease.HELD: {
        "published, or first write posted": Lease.PUBLISHED,
        "never published": Lease.RELEASED,
    },
    Lease.PUBLISHED: {
        "every planned write landed": Lease.RELEASED,
        "failed": Lease.QUARANTINED,
    },
    Lease.QUARANTINED: {"every rank fenced, nothing read": Lease.RELEASED},
    Lease.RELEASED: {},
}
