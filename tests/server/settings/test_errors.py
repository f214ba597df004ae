"""The error taxonomy is closed: codes, classes, statuses, round trips."""

import msgspec
import pytest

from segue.kv import errors
from segue.kv.errors import ErrorCode, ErrorInfo, SegueError, status_of

CLASSES = SegueError.__subclasses__()


def test_codes_and_classes_match_one_to_one() -> None:
    assert sorted(c.code for c in CLASSES) == sorted(ErrorCode)


def test_tree_has_one_level() -> None:
    deeper = [d for c in CLASSES for d in c.__subclasses__() if d.__module__ == errors.__name__]
    assert deeper == []


@pytest.mark.parametrize("cls", CLASSES)
def test_status_is_an_honest_http_error(cls: type[SegueError]) -> None:
    assert 400 <= cls.status < 600
    assert status_of(cls.code) == cls.status


def test_client_mistakes_are_4xx_and_not_retryable() -> None:
    for code in ("INVALID_REQUEST", "NOT_FOUND", "REQUEST_TOO_LARGE", "UNAUTHORIZED", "DP_RANK_OUT_OF_RANGE"):
        info = ErrorInfo(code=ErrorCode(code), text="x").exception().info
        assert status_of(info.code) // 100 == 4
        assert not info.retryable


def test_what_may_pass_by_itself_or_at_another_worker_is_retryable_and_nothing_else_is() -> None:
    """Attempts, dialers, the registry's clients and public clients go by it."""
    assert {c.__name__ for c in CLASSES if c.retryable} == {
        *("BootstrapUnreachable", "BootstrapTimeout", "PeerLost", "PeerRestarted", "Starting", "Draining"),
        *("TransferFailed", "ChecksumMismatch", "MetadataMismatch", "OutOfCapacity", "RequestTimeout"),
    }


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("wire", [msgspec.json, msgspec.msgpack])
def test_record_survives_the_wire_and_becomes_its_class(cls: type[SegueError], wire: object) -> None:
    sent = cls(
        "broke", phase="TRANSFERRING", origin="prefill 3fa94c01 dp0", peer="decode", room=7, elapsed_s=1.5
    )
    encode, decode = (m for m in (wire.encode, wire.decode))  # type: ignore[attr-defined]
    info = decode(encode(sent.info), type=ErrorInfo)
    assert info == sent.info
    again = info.exception()
    assert type(again) is cls
    assert again.info is info
    assert str(again) == "broke"


def test_unknown_code_is_refused_by_the_decoder() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"code": "UNKNOWN_REASON_FROM_ANOTHER_RANK", "text": ""}', type=ErrorInfo)


def test_text_is_bounded_in_the_record() -> None:
    assert len(SegueError("x" * 10_000).info.text) == errors.MAX_ERROR_TEXT


def test_at_fills_only_what_is_empty() -> None:
    error = errors.PeerLost("gone", phase="BOOTSTRAPPING").at(
        phase="TRANSFERRING", origin="decode ab dp0", room=9
    )
    assert (error.info.phase, error.info.origin, error.info.room) == ("BOOTSTRAPPING", "decode ab dp0", 9)


def test_retryable_can_be_overridden_for_one_instance() -> None:
    assert errors.PeerLost("gone").info.retryable
    assert not errors.PeerLost("gone", retryable=False).info.retryable
