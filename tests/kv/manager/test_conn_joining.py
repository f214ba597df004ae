"""The plan of two leaders from their descriptions: pure, and the same on both sides."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kv_sides import SHAPE, assert_handed_over, sides
from test_conn_paths import endpoint_bytes, info

from segue.kv import peers
from segue.kv.errors import LayoutMismatch, PeerRefused
from segue.kv.ids import LeaderId, RankCoord, Role, new_incarnation
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import PoolSpec
from segue.kv.peers import Compatibility, PeerPlan, join
from segue.kv.protocol.messages import HANDOFF_VERSIONS, LeaderInfo
from segue.kv.session.api import PeerInfo
from segue.kv.transport.kinds import KINDS
from segue.kv.versions import Versions


def joined(prefill: LeaderInfo, decode: LeaderInfo) -> PeerPlan:
    """The plan on either side."""
    found = []
    for role, mine, theirs in ((Role.PREFILL, prefill, decode), (Role.DECODE, decode, prefill)):
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        peer = PeerInfo(LeaderId(new_incarnation()), other, "there", msgspec.msgpack.encode(theirs))
        made = join(role, mine, peer)
        assert made.info == theirs
        found.append(made)
    one, other_one = found
    assert (one.names, one.plan.pairs) == (other_one.names, other_one.plan.pairs)
    return one


def thirds(*order: int) -> list[PoolSpec]:
    """A rank for each layer, in this order of them."""
    return [
        PoolSpec(
            shape=SHAPE,
            coord=RankCoord(pp=layer),
            page_tokens=4,
            pages=16,
            layer_start=layer,
            layer_count=1,
            head_count=SHAPE.kv_heads,
        )
        for layer in order
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": Versions(HANDOFF_VERSIONS.oldest - 1, HANDOFF_VERSIONS.oldest - 1)},
        {"versions": Versions(HANDOFF_VERSIONS.newest + 1, HANDOFF_VERSIONS.newest + 3)},
        {"model": "m" * 16 + "a"},
        {"model": ""},
        {"endpoints": {}},
        {"endpoints": {"tcp": []}, "ranks": []},
    ],
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_does_not_fit_is_refused_whichever_side_says_it(role: Role, changes: dict[str, Any]) -> None:
    mine = info(model="m" * 16 + "b") if "model" in changes else info()
    peer = PeerInfo(LeaderId(new_incarnation()), role, "there", msgspec.msgpack.encode(info(**changes)))
    with pytest.raises(LayoutMismatch if "ranks" in changes else PeerRefused):
        join(Role.DECODE if role is Role.PREFILL else Role.PREFILL, mine, peer)


@pytest.mark.parametrize("order", [("fake", "tcp"), ("tcp", "fake")])
def test_the_order_is_that_of_prefill_and_only_what_both_offer_is_in_it(order: tuple[str, str]) -> None:
    known = {"fake": [endpoint_bytes(1000, "fake")], "tcp": [endpoint_bytes(1000)]}
    prefill = info(endpoints={name: known[name] for name in order} | {"nixl": [endpoint_bytes(1000, "nixl")]})
    decode = info(endpoints={name: known[name] for name in reversed(order)})
    assert joined(prefill, decode).names == list(order)


def test_no_transport_in_common_names_those_of_either_side() -> None:
    shm = info(endpoints={"shm": [endpoint_bytes(1000, "shm")]})
    with pytest.raises(PeerRefused, match=r"prefill offers \['shm'\], decode \['tcp'\]"):
        joined(shm, info())


def test_a_pair_is_planned_once_a_session_on_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []
    monkeypatch.setattr(peers, "plan_pair", lambda *specs: planned.append(specs) or plan_pair(*specs))
    with sides() as (prefill, decode):
        assert_handed_over(prefill, decode, 8, 8)
    assert len(planned) == 2


def test_what_was_found_of_peers_whose_sessions_never_open_is_bounded() -> None:
    there = Compatibility(Role.PREFILL, info(), KINDS)
    hello = msgspec.msgpack.encode(info())
    for _ in range(peers.BETWEEN + 5):
        there.check_peer(PeerInfo(LeaderId(new_incarnation()), Role.DECODE, "there", hello))
    assert len(there._checked) == peers.BETWEEN
    last = next(reversed(there._checked))
    assert there.checked(last) == there.checked(last), "it is found again"
    assert len(there._checked) == peers.BETWEEN - 1


@pytest.mark.parametrize(
    ("mine", "theirs", "version"), [((3, 5), (4, 9), 5), ((4, 9), (3, 5), 5), ((3, 9), (5, 5), 5)]
)
def test_two_leaders_use_the_highest_hand_off_version_that_both_speak(
    mine: tuple[int, int], theirs: tuple[int, int], version: int
) -> None:
    hello = msgspec.msgpack.encode(info(versions=Versions(*theirs)))
    peer = PeerInfo(LeaderId(new_incarnation()), Role.DECODE, "there", hello)
    assert join(Role.PREFILL, info(versions=Versions(*mine)), peer).version == version


def test_leaders_without_a_common_hand_off_version_are_refused_with_both_ranges() -> None:
    """Also if the rest of what the peer says cannot be read: it may mean something else by then."""
    hello = msgspec.msgpack.encode({"versions": [9, 11], "model": 3})
    peer = PeerInfo(LeaderId(new_incarnation()), Role.DECODE, "there", hello)
    with pytest.raises(
        PeerRefused, match="there speaks versions 9 to 11, this side versions 6 to 8"
    ) as caught:
        join(Role.PREFILL, info(versions=Versions(6, 8)), peer)
    assert not caught.value.info.retryable
