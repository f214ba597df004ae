"""The registry of everything in segue that decodes bytes from outside."""

from __future__ import annotations

import fuzz_endpoints
import fuzz_http
import fuzz_peers
import fuzz_staged
import fuzz_wire
from fuzz_changes import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for room in (fuzz_wire, fuzz_staged, fuzz_peers, fuzz_endpoints, fuzz_http)
    for target in room.TARGETS
}
