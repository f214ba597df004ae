"""Direct mode: a router gives each half of a request to a leader, and the halves find each other by room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from pair import FRONT, VOCAB, Pair

from segue.engine.request import FinishReason, Request, SamplingParams, Usage
from segue.kv.errors import AbortedByClient, ErrorInfo
from segue.kv.ids import OPEN_RANK, LeaderId, RoomKey
from segue.kv.protocol import events
from segue.kv.protocol.messages import Declined
from segue.kv.protocol.room_ranks import DpRanks, PrefillInstance
from segue.server.messages.control import Submit
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.prefill import STALE_S
from segue_lab.sim.sim_engine import reference

COUNT = 6
PROMPT = list(range(18))


class Legs(Pair):
    """Both legs of a request, posted by hand. Answers of prefill are under `p` and the name, of decode under
    `d` and the name."""

    def __init__(self, **more: int) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        me = self.prefill.me
        instances = {me.incarnation: PrefillInstance(DpRanks(), frozenset((0,)))}
        self.decode.post(events.PrefillInstances(instances))

    def prefill_leg(
        self, name: str, room: int, prompt: list[int] = PROMPT, ordinal: int = 0, budget_s: float = 100.0
    ) -> None:
        ticket = self.ticket(room, budget_s=budget_s, decode=self.prefill.me, ordinal=ordinal)
        self._leg("p" + name, ticket, prompt, SamplingParams(max_tokens=COUNT, seed=5))

    def decode_leg(
        self, name: str, room: int, prompt: list[int] = PROMPT, ordinal: int = 0, **sampling: object
    ) -> list[int]:
        """Returns what it generates."""
        prefill = LeaderId(self.prefill.me.incarnation, OPEN_RANK)
        ticket = self.ticket(room, prefill=prefill, ordinal=ordinal)
        params = structs.replace(SamplingParams(max_tokens=COUNT, seed=5), **sampling)
        self._leg("d" + name, ticket, prompt, params)
        return reference(prompt, params, VOCAB, COUNT)

    def _leg(self, name: str, ticket: Ticket, prompt: list[int], sampling: SamplingParams) -> None:
        node = self.prefill if name[0] == "p" else self.decode
        submit = Submit(Request(request_id=name, prompt=prompt, sampling=sampling), ticket)
        node.scheduler.submit(FRONT, submit, self.clock.now())

    def cancel(self, name: str) -> ErrorInfo:
        error = AbortedByClient("the client left").info
        node = self.prefill if name[0] == "p" else self.decode
        node.scheduler.cancel(FRONT, name, error, self.clock.now())
        return error


@pytest.mark.parametrize("tokens", [1, 4, 18, 41])
@pytest.mark.parametrize("first", ["prefill", "decode", "prefill, computed"])
def test_the_halves_meet_in_either_order_and_prefill_is_answered_with_the_first_token(
    tokens: int, first: str
) -> None:
    legs, prompt = Legs(), [(7 * i) % VOCAB for i in range(tokens)]
    if first == "decode":
        wanted = legs.decode_leg("r", 9, prompt)
        legs.prefill_leg("r", 9, prompt)
    else:
        legs.prefill_leg("r", 9, prompt)
        if "computed" in first:
            legs.run()
            assert legs.prefill.scheduler.unbound == 1
        wanted = legs.decode_leg("r", 9, prompt)
    legs.run()
    assert legs.tokens("pr") == wanted[:1]
    last = legs.outputs["pr"][-1]
    assert (last.finish, last.usage) == (
        FinishReason.LENGTH,
        Usage(prompt_tokens=tokens, computed=tokens, output_tokens=1),
    )
    assert legs.tokens("dr") == wanted
    assert legs.prefill.engine.computed_tokens == tokens
    assert legs.prefill.scheduler.abandoned == 0


def test_samples_of_one_room_meet_by_their_number_and_not_by_their_order() -> None:
    legs, prompts = Legs(), [[i, *PROMPT] for i in range(3)]
    for k in (2, 0, 1):
        legs.prefill_leg(f"{k}", 9, prompts[k], k)
    wanted = {k: legs.decode_leg(f"{k}", 9, prompts[k], k) for k in (1, 2, 0)}
    legs.run()
    assert all(legs.tokens(f"d{k}") == tokens for k, tokens in wanted.items())


def test_another_prompt_binds_nothing_and_the_right_one_still_does() -> None:
    legs = Legs()
    legs.prefill_leg("r", 9)
    legs.decode_leg("wrong", 9, [1, 2, 3])
    legs.run()
    assert legs.errors("dwrong") == ["METADATA_MISMATCH"]
    assert legs.prefill.scheduler.unbound == 1
    legs.cancel("pr")
    legs.prefill.scheduler.table[RoomKey(9)].handle.abort()


# ---- one half ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
def test_a_prefill_leg_whose_client_leaves_ends_decode_s_now_or_when_it_comes(after: bool) -> None:
    legs = Legs()
    legs.prefill_leg("r", 9)
    if after:
        legs.cancel("pr")
        legs.run()
    legs.decode_leg("r", 9)
    if not after:
        legs.cancel("pr")
    legs.run()
    assert legs.errors("dr") == ["ABORTED_BY_CLIENT"]


@pytest.mark.parametrize("after", [False, True])
def test_a_decode_leg_that_fails_before_it_has_pages_ends_prefill_s_now_or_when_it_comes(after: bool) -> None:
    legs = Legs()
    held = legs.decode.pool.allocate(legs.decode.pool.free)
    if not after:
        legs.prefill_leg("r", 9)
    legs.decode_leg("r", 9)
    legs.pump()
    legs.decode.turn()
    legs.cancel("dr")
    legs.pump()
    if after:
        legs.prefill_leg("r", 9)
    legs.run()
    assert legs.errors("pr") == ["ABORTED_BY_CLIENT"]
    assert legs.prefill.engine.computed_tokens == 0
    legs.decode.pool.release(held)


@pytest.mark.parametrize("half", ["prefill", "decode"])
@pytest.mark.parametrize("after", [False, True])
def test_a_half_that_is_refused_ends_the_other_one_now_or_when_it_comes(half: str, after: bool) -> None:
    """A placer would have told both."""
    legs = Legs()
    (legs.prefill if half == "prefill" else legs.decode).scheduler.drain()
    one, other = legs.prefill_leg, legs.decode_leg
    if half == "decode":
        one, other = other, one  # type: ignore[assignment]
    if after:
        one("r", 9)
        legs.pump()
        other("r", 9)
    else:
        other("r", 9)
        legs.pump()
        one("r", 9)
    legs.run()
    assert legs.errors("pr") == legs.errors("dr") == ["DRAINING"]


def test_a_second_leg_of_a_room_is_refused_and_the_first_goes_on() -> None:
    legs = Legs()
    legs.prefill_leg("r", 9)
    legs.prefill_leg("again", 9)
    wanted = legs.decode_leg("r", 9)
    legs.decode_leg("again", 9)
    legs.run()
    assert legs.errors("pagain") == legs.errors("dagain") == ["INVALID_REQUEST"]
    assert legs.tokens("dr") == wanted


def test_a_placed_request_that_is_refused_says_nothing_to_the_other_half() -> None:
    """Its frontend does."""
    legs, said = Legs(), list[object]()
    legs.lose = lambda effect: bool(said.append(effect)) if isinstance(effect, events.Send) else False
    for node in (legs.prefill, legs.decode):
        node.scheduler.drain()
    legs.submit("r", PROMPT, 3)
    legs.run()
    assert said == []


def test_decode_that_fails_once_kv_has_come_declines_nothing() -> None:
    legs, said = Legs(), list[object]()

    def noted(effect: events.Effect) -> bool:
        if isinstance(effect, events.Send) and isinstance(effect.message, Declined):
            said.append(effect)
        return False

    legs.lose = noted
    legs.prefill_leg("r", 9)
    legs.decode_leg("r", 9)
    legs.run()
    assert legs.errors("dr") == []
    assert said == []


# ---- nobody comes ------------------------------------------------------------------------------------


def test_a_room_that_nobody_binds_ends_with_the_time_of_its_request_and_is_counted() -> None:
    legs = Legs()
    legs.prefill_leg("r", 9)
    legs.run()
    assert legs.tokens("pr")
    assert not legs.prefill.scheduler.idle
    legs.clock.advance(100.0)
    legs.run()
    assert legs.prefill.scheduler.abandoned == 1


def test_prompts_that_nobody_has_bound_hold_half_of_the_pool_and_others_go_on() -> None:
    legs = Legs(prefill_pages=20)
    for k in range(4):
        legs.prefill_leg(f"{k}", 10 + k, [k, *PROMPT])  # five pages each
    legs.run()
    assert [k for k in range(4) if f"p{k}" in legs.outputs] == [0, 1]
    wanted = legs.submit("placed", [9, *PROMPT], COUNT)
    legs.run()
    assert legs.tokens("placed") == wanted
    wanted = [legs.decode_leg(f"{k}", 10 + k, [k, *PROMPT]) for k in range(4)]
    legs.run()
    assert [legs.tokens(f"d{k}") for k in range(4)] == wanted


def test_a_prompt_of_more_than_half_of_the_pool_is_computed_alone() -> None:
    legs, prompt = Legs(prefill_pages=20), list(range(60))
    legs.prefill_leg("r", 9, prompt)
    legs.run()
    assert legs.tokens("pr")
    wanted = legs.decode_leg("r", 9, prompt)
    legs.run()
    assert legs.tokens("dr") == wanted


@pytest.mark.parametrize("placed", [False, True])
def test_a_stale_room_ends_where_others_need_its_pages_and_not_before(placed: bool) -> None:
    legs, prompt = Legs(prefill_pages=20, rests=placed), list(range(36))  # nine pages
    legs.prefill_leg("stale", 9, prompt)
    legs.run()
    other = list(range(100, 152))  # 13 pages, of which at most 11 are free
    if placed:
        legs.submit("other", other, COUNT)
    else:
        legs.prefill_leg("other", 10, other)
    legs.run()
    name = "other" if placed else "pother"
    assert name not in legs.outputs
    assert legs.prefill.scheduler.next_deadline() == STALE_S
    legs.clock.advance(STALE_S)
    legs.run()
    assert legs.tokens(name)
    assert legs.prefill.scheduler.abandoned == 1
    legs.decode_leg("stale", 9, prompt)
    legs.run()
    assert legs.errors("dstale") == ["OUT_OF_CAPACITY"]


def test_a_stale_room_that_is_in_nobody_s_way_waits_on() -> None:
    legs = Legs()
    legs.prefill_leg("r", 9)
    legs.run()
    legs.clock.advance(STALE_S + 1.0)
    legs.run()
    wanted = legs.decode_leg("r", 9)
    legs.run()
    assert legs.tokens("dr") == wanted


def test_a_model_with_state_keeps_half_of_its_slots_for_prompts_that_decode_has_bound() -> None:
    legs = Legs(slots=(4, 4))  # type: ignore[arg-type]
    for k in range(4):
        legs.prefill_leg(f"{k}", 10 + k, [k, *PROMPT])
    legs.run()
    assert [k for k in range(4) if f"p{k}" in legs.outputs] == [0, 1]
    wanted = [legs.decode_leg(f"{k}", 10 + k, [k, *PROMPT]) for k in range(4)]
    legs.run()
    assert [legs.tokens(f"d{k}") for k in range(4)] == wanted


# ---- drain and DP ranks --------------------------------------------------------------------------------


def test_a_drain_waits_for_rooms_that_decode_has_not_taken_yet() -> None:
    legs = Legs()
    legs.prefill_leg("r", 9)
    legs.run()
    legs.prefill.scheduler.drain()
    assert not legs.prefill.scheduler.drained
    wanted = legs.decode_leg("r", 9)
    legs.run()
    assert legs.tokens("dr") == wanted
    assert legs.prefill.scheduler.drained


def test_a_drain_ends_rooms_that_no_decode_takes_once_they_are_stale() -> None:
    """A switch of roles would wait for the time of their requests."""
    legs = Legs()
    for k in range(3):
        legs.prefill_leg(f"{k}", 9 + k, [k, *PROMPT])
        legs.run()
        legs.clock.advance(1.0)
    legs.prefill.scheduler.drain()
    legs.run()
    assert legs.prefill.scheduler.unbound == 3
    assert legs.prefill.scheduler.next_deadline() == STALE_S
    legs.clock.advance(STALE_S - 3.0)
    legs.run()
    assert legs.prefill.scheduler.unbound == 2
    legs.clock.advance(2.0)
    legs.run()
    assert (legs.prefill.scheduler.unbound, legs.prefill.scheduler.abandoned) == (0, 3)
    assert legs.prefill.scheduler.drained
    legs.decode_leg("0", 9, [0, *PROMPT])
    legs.run()
    assert legs.errors("d0") == ["OUT_OF_CAPACITY"]


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_half_with_a_forged_ticket_says_nothing_to_the_other_one(half: str) -> None:
    legs = Legs()
    node = legs.prefill if half == "prefill" else legs.decode
    node.scheduler.admission.secret = b"a secret that the ticket does not show"
    one, other = legs.prefill_leg, legs.decode_leg
    if half == "decode":
        one, other = other, one  # type: ignore[assignment]
    one("forged", 9)
    legs.run()
    node.scheduler.admission.secret = b""
    one("r", 9)
    other("r", 9)
    legs.run()
    assert legs.errors(half[0] + "forged") == ["UNAUTHORIZED"]
    assert legs.tokens("dr")


@pytest.mark.parametrize("looked_for", [0, 1])
def test_a_refused_half_of_prefill_is_registered_where_decode_looks_elsewhere(looked_for: int) -> None:
    """Else decode would wait for the rank of a room that nobody opens."""
    legs = Legs()
    legs.prefill.scheduler.config = replace(
        legs.prefill.scheduler.config, dp=DpRanks(size=2, load_balance="follow_bootstrap_room")
    )
    legs.prefill.scheduler.drain()
    legs.prefill_leg("r", 8 + looked_for)
    asked = [e for e in legs.prefill.effects if isinstance(e, events.RegisterRoom)]
    assert len(asked) == looked_for


@pytest.mark.parametrize(
    ("dp", "announced"),
    [
        (DpRanks(), False),
        (DpRanks(size=3, load_balance="follow_bootstrap_room"), False),
        (DpRanks(size=3, load_balance="follow_bootstrap_room", force_query=True), True),
        (DpRanks(size=3), True),
    ],
    ids=["one rank", "the room names it", "forced", "by load"],
)
def test_only_a_rank_that_decode_cannot_infer_is_registered(dp: DpRanks, announced: bool) -> None:
    legs = Legs(rests=False)
    legs.prefill.scheduler.config = replace(legs.prefill.scheduler.config, dp=dp)
    legs.prefill_leg("r", 9)  # 9 % 3 is our rank
    asked = [e for e in legs.prefill.effects if isinstance(e, events.RegisterRoom)]
    assert bool(asked) is announced


def test_policy_fail_ends_both_halves() -> None:
    """The room names rank 1 of three, its leg was posted to rank 0, and decode was sent there by a hint."""
    legs = Legs()
    dp = DpRanks(size=3, load_balance="follow_bootstrap_room", on_conflict="fail")
    legs.prefill.scheduler.config = replace(legs.prefill.scheduler.config, dp=dp)
    legs.decode_leg("r", 10)
    legs.prefill_leg("r", 10)
    legs.run()
    assert legs.errors("pr") == legs.errors("dr") == ["DP_RANK_CONFLICT"]


# ---- the first token -----------------------------------------------------------------------------------


def test_a_first_token_that_would_end_an_answer_too_early_is_drawn_again_by_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-router does not tell prefill the client's `min_tokens`."""
    legs = Legs()
    [first, *_] = legs.decode_leg("other", 8)  # prefill's draw
    legs.prefill_leg("other", 8)
    legs.run()
    before = legs.prefill.engine.computed_tokens
    legs.prefill_leg("r", 9, PROMPT)
    wanted = legs.decode_leg("r", 9, PROMPT, stop_token_ids=[first], min_tokens=3)
    computed = legs.decode.engine.computed_tokens
    legs.run()
    assert len(legs.tokens("dr")) >= 3
    assert legs.tokens("dr") == wanted[: len(legs.tokens("dr"))]
    assert legs.decode.engine.computed_tokens > computed
    assert legs.prefill.engine.computed_tokens >= before
