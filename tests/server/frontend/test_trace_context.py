"""A client's W3C `traceparent` reaches the workers; one that is not legal reaches nobody."""

from __future__ import annotations

import pytest
from frontend_rig import FakeBackend, Running

from segue.server.messages.records import Records

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"42-{TRACE}-{SPAN}-01-of-another-version", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-01-more", ""),
        (f"ff-{TRACE}-{SPAN}-01", ""),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE.upper()}-{SPAN}-01", ""),
        ("nonsense", ""),
        ("", ""),
    ],
)
def test_the_workers_are_told_what_the_client_said(
    door: Running, backend: FakeBackend, sent: str, passed_on: str
) -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}
    headers = {"traceparent": sent, "x-request-id": "traced"} if sent else {}
    assert door.post("/v1/completions", body, headers=headers).status_code == 200
    assert [request.traceparent for request in backend.requests] == [passed_on] * 2
    records: Records = door.door.records
    found = door.on_loop(lambda: records.find("traced"))
    assert [record.traceparent for record in found] == ([passed_on] if sent else [])
