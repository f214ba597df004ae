"""The frontend says what it holds: everything while a request runs, nothing when it has ended."""

from __future__ import annotations

from frontend_rig import FakeBackend, Running


def test_the_door_is_at_rest_only_when_nothing_runs(door: Running, backend: FakeBackend) -> None:
    assert door.http.get("/integrity").json()["at_rest"]
    backend.hang_at = 1
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9, "stream": True}
    with door.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: dropping it closes the connection
        next(lines)
        state = door.http.get("/integrity").json()
        assert not state["at_rest"]
        assert (state["tables"]["calls"], state["tables"]["streams"]) == (1, 1)
        assert state["tables"]["bodies"] >= 0
    assert backend.ended.wait(60)
    # The call ends right after its backend was told; nothing else tells of it.
    for _ in range(200):
        state = door.http.get("/integrity").json()
        if state["at_rest"]:
            break
    assert state["at_rest"], state
    assert state["role"] == "frontend"
    assert state["problems"] == []
    assert state["descriptors"] > 0
    assert state["rss_bytes"] > 2**20


def test_a_table_that_went_negative_is_a_problem(door: Running) -> None:
    door.door.memory.used_bytes = -5
    assert door.http.get("/integrity").json()["problems"] == ["bodies is negative: -5"]
    door.door.memory.used_bytes = 0
