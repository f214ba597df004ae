"""The opening, without sockets."""

from __future__ import annotations

import pytest
from session_peers import SECRET, hello

from segue.kv.errors import ErrorCode, LayoutMismatch, PeerRefused, SegueError, Unauthorized
from segue.kv.session.frames import Duplicate, Opened, Proof, SessionAccepted, SessionRefused, Welcome
from segue.kv.session.session_handshake import Handshake, Progress, prove, session_key
from segue.kv.versions import Versions

KEY = session_key(SECRET)
ONE = Versions(1, 1)


def pair(dialler_key: bytes | None = KEY, listener_key: bytes | None = KEY) -> tuple[Handshake, Handshake]:
    a = hello("a", keyed=dialler_key is not None)
    b = hello("b", keyed=listener_key is not None)
    return (
        Handshake(a, dialling=True, key=dialler_key, versions=ONE),
        Handshake(b, dialling=False, key=listener_key, versions=ONE),
    )


def exchange_hellos(dialler: Handshake, listener: Handshake) -> None:
    assert listener.receive(dialler.me, 10.0) is Progress.WAIT
    assert dialler.receive(listener.me, 10.0) is Progress.SEND_PROOF


@pytest.mark.parametrize("key", [KEY, None])
def test_both_sides_prove_themselves_and_the_smaller_incarnation_decides(key: bytes | None) -> None:
    dialler, listener = pair(key, key)
    exchange_hellos(dialler, listener)
    assert listener.receive(dialler.proof_frame(), 10.0) is Progress.AUTHENTICATED
    assert dialler.receive(listener.proof_frame(), 10.0) is Progress.AUTHENTICATED
    assert dialler.receive(Welcome(payload=b"1", max_frame_bytes=1), 10.0) is Progress.PAYLOAD
    assert listener.receive(Welcome(payload=b"2", max_frame_bytes=1), 10.0) is Progress.PAYLOAD
    assert dialler.decides
    assert not listener.decides
    assert dialler.receive(SessionAccepted([b"x" * 16]), 10.0) is Progress.DECIDE
    assert dialler.others == {b"x" * 16}
    assert listener.receive(Opened(), 10.0) is Progress.OPEN
    assert dialler.id == listener.id


@pytest.mark.parametrize("listener_decides", [True, False])
def test_who_decides_takes_no_decision_from_the_other_side(listener_decides: bool) -> None:
    """Else a session is open on one side while the other still looks whether it wants it."""
    for said in (Opened(), Duplicate()):
        first, second = ("b", "a") if listener_decides else ("a", "b")
        dialler = Handshake(hello(first), dialling=True, key=KEY, versions=ONE)
        listener = Handshake(hello(second), dialling=False, key=KEY, versions=ONE)
        exchange_hellos(dialler, listener)
        listener.receive(dialler.proof_frame(), 10.0)
        dialler.receive(listener.proof_frame(), 10.0)
        decides = listener if listener_decides else dialler
        assert decides.decides
        decides.receive(Welcome(payload=b"", max_frame_bytes=1), 10.0)
        with pytest.raises(PeerRefused, match="was due"):
            decides.receive(said, 10.0)


@pytest.mark.parametrize(
    "change",
    [
        {"dp_rank": 3},
        {"role": "prefill"},
        {"advertised": "10.0.0.1:9"},
        {"nonce": b"z" * 32},
        {"keepalive_s": 0.02},
    ],
)
def test_a_proof_covers_every_claim(change: dict[str, object]) -> None:
    a, b = hello("a"), hello("b")
    tampered = hello("a", **change)
    assert prove(KEY, (ONE, ONE), a, b, True) != prove(KEY, (ONE, ONE), tampered, b, True)
    assert prove(KEY, (ONE, ONE), a, b, True) != prove(KEY, (ONE, Versions(1, 2)), a, b, True)
    assert prove(KEY, (ONE, ONE), a, b, True) != prove(KEY, (ONE, ONE), b, a, True)


@pytest.mark.parametrize(
    "early", [Proof(b""), Welcome(payload=b"", max_frame_bytes=9), Opened(), SessionAccepted()]
)
def test_no_step_can_be_skipped(early: object) -> None:
    _, listener = pair()
    with pytest.raises(PeerRefused, match="HELLO was due"):
        listener.receive(early, 10.0)  # type: ignore[arg-type]
    assert not listener.authenticated


def test_a_stranger_cannot_make_us_raise_any_error_it_likes() -> None:
    claim = LayoutMismatch("words in our mouth", room=7).info
    dialler, listener = pair()
    assert dialler.receive(SessionRefused(claim), 10.0) is Progress.REFUSED
    assert dialler.refusal is not None
    assert dialler.refusal.code is ErrorCode.PEER_REFUSED
    dialler, listener = pair()
    exchange_hellos(dialler, listener)
    dialler.receive(listener.proof_frame(), 10.0)
    assert dialler.receive(SessionRefused(claim), 10.0) is Progress.REFUSED
    assert dialler.refusal == claim
    assert isinstance(claim.exception(), SegueError)


def test_somebody_in_between_cannot_make_both_sides_use_an_older_version() -> None:
    """The preambles are not encrypted; the proofs cover what each side has read of the other's."""
    both, older = Versions(1, 2), Versions(1, 1)
    dialler = Handshake(hello("a"), dialling=True, key=KEY, versions=both)
    listener = Handshake(hello("b"), dialling=False, key=KEY, versions=both)
    assert dialler.meet(older)
    assert listener.meet(older)
    assert (dialler.version, listener.version) == (1, 1)
    exchange_hellos(dialler, listener)
    with pytest.raises(Unauthorized):
        listener.receive(dialler.proof_frame(), 10.0)
