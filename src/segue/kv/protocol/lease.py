"""Who may touch a hand-off's pages, and when that ends.

The state of a machine says it (`Machine.STATES`); there is no second book of it. `LEASE_TABLE` is what every
row of both machines' tables must agree with (a test compares them): no way leads from pages that somebody
else may touch to free ones but completion or proof, and none out of `RELEASED`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Lease(enum.StrEnum):
    """Who may touch the pages. `HELD`: nobody but their engine. `PUBLISHED`: also the peer, or our own
    transport. `QUARANTINED`: these perhaps still, though the hand-off has failed. `RELEASED`: the engine
    alone."""

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
