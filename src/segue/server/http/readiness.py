"""The answer to `GET /ready`, the same at each part that has an HTTP port."""

from __future__ import annotations


def readiness(lacking: str = "") -> tuple[int, dict[str, object]]:
    """Status and body. `lacking` says why nothing should be sent here now; empty: requests are welcome."""
    return 503 if lacking else 200, {"ready": not lacking, "reason": lacking or "ready"}
