"""The registry of everything in segue that decodes bytes from outside."""

from __future__ import annotations

import fuzz_endpoints
import fuzz_http
import fuzz_peers
import fuzz_wire
from fuzz_loop import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (*fuzz_wire.TARGETS, *fuzz_peers.TARGETS, *fuzz_endpoints.TARGETS, *fuzz_http.TARGETS)
}
