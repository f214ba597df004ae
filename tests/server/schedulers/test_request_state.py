"""A request's reports token by token: its end, and its messages to the frontend."""

from __future__ import annotations

import pytest
from test_unified import FRONT, ME

from segue.engine.request import FinishReason, Request, SamplingParams, TokenLogprob
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.request_state import RequestState

EOS, STOP, OTHER = 7, 8, 9


def begun(given: int = 0, **sampling: object) -> RequestState:
    """A request of two tokens, of whose answer `given` tokens are there; it came at 5.0."""
    asked = SamplingParams(stop_token_ids=[STOP], **{"max_tokens": 6, **sampling})  # type: ignore[arg-type]
    request = Request(request_id="r", prompt=[1, 2], sampling=asked, output=[OTHER] * given)
    ticket = Ticket(room=1, attempt=0, prefill=ME, decode=ME, budget_s=9.0)
    return RequestState(FRONT, request, ticket, 1, 5.0, 14.0, asked.max_tokens)


@pytest.mark.parametrize("stop", [EOS, STOP])
@pytest.mark.parametrize("min_tokens", range(5))
@pytest.mark.parametrize("given", range(5))
def test_what_was_given_counts_towards_min_tokens_and_max_tokens(
    given: int, min_tokens: int, stop: int
) -> None:
    """As if one instance had drawn the whole answer: a token after `min_tokens` others may stop it."""
    output = begun(given, min_tokens=min_tokens).add_token(stop, None, {EOS})
    may_stop = given >= min_tokens
    assert (output.finish, output.stop_token) == ((FinishReason.STOP, stop) if may_stop else (None, None))
    state = begun(given)
    ends = [state.add_token(OTHER, None, {EOS}).finish for _ in range(6 - given)]
    assert ends == [None] * (5 - given) + [FinishReason.LENGTH]


def test_what_is_known_of_the_prompt_is_told_once_and_as_it_was_then() -> None:
    state = begun(2, logprobs=1)
    entries = [None, TokenLogprob(2, -0.5, [])]
    state.prompt_logprobs = list(entries)
    state.enter("prefill", 6.0)
    state.enter("ready", 8.0)
    first = state.add_token(OTHER, TokenLogprob(OTHER, -1.0, []), {EOS})
    state.enter("decode", 9.0)
    state.enter("retracted", 9.5)
    more = [state.add_token(OTHER, None, {EOS}) for _ in range(3)]
    assert first.prompt_logprobs == entries
    assert first.timeline == {"queue": 1.0, "prefill": 2.0}, "what comes later is not of the first token"
    assert [out.prompt_logprobs for out in more] == [None] * 3
    assert [out.timeline for out in more] == [{}] * 3
    assert [out.position for out in (first, *more)] == [2, 3, 4, 5]
    assert [len(out.logprobs) for out in (first, *more)] == [1, 0, 0, 0]
    assert [out.usage is not None for out in (first, *more)] == [True, False, False, True]
    assert more[-1].usage is not None
    assert more[-1].usage.output_tokens == 6
