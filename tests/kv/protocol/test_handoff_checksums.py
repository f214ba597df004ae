"""Checksums over real bytes: a bit that flips is seen, and a bug in the verification costs one hand-off."""

from __future__ import annotations

import pytest
from handoff_world import PROMPT, Case
from script_driver import ROOM, Desk

from segue.kv.errors import ErrorCode
from segue.kv.ids import ChecksumMode, KVPoll
from segue.kv.protocol.tally import Tally


def test_one_flipped_bit_in_any_chunk_is_seen() -> None:
    for chunk in range(3):
        w = Case(seed=chunk, kv_checksum=ChecksumMode.FULL).waiting()
        for tokens in (3, 3, 4):
            w.send_chunk(w.s, tokens)
        w.send_metadata(w.s)
        w.arrive()
        w.flip(chunk)
        w.settle()
        assert [e.code for e in w.r.errors] == [ErrorCode.CHECKSUM_MISMATCH]
        assert f"chunk {chunk} " in w.r.errors[0].text
        w.come_to_rest()


def test_a_handler_that_breaks_on_a_verdict_leaves_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("injected")

    desk = Desk("new d; OpenReceiver; Publish; p says Metadata; p says ChunkPosted checksum=5")
    with monkeypatch.context() as patch:
        patch.setattr(Tally, "check", broken)
        desk.do("summed 5")
    d = desk.nodes["d"]
    error = d.ends[ROOM].error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    desk.do("fenced unproven; p says Drained")
    assert d.releases[ROOM] == 1
    desk.rest()


def test_lesson_08_a_doubt_about_bytes_ends_the_request_and_frees_both_sides() -> None:
    """aws-do-eks#84: requests served from blocks that were not theirs, logged and continued."""
    w = Case(kv_checksum=ChecksumMode.FULL).waiting()
    w.send_metadata(w.s)
    w.send_chunk(w.s, PROMPT)
    w.arrive()
    w.flip()
    w.settle()
    for job in (w.s, w.r):
        assert job.phases[-1] is KVPoll.FAILED
        assert job.errors[0].code is ErrorCode.CHECKSUM_MISMATCH
    w.come_to_rest()
