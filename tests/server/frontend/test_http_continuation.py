"""A worker lost at each token, as the HTTP server sees it: every answer is the one of an undisturbed run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from frontend_rig import FakeBackend, Running, serve
from msgspec.structs import replace

from segue.engine.request import Output, Request
from segue.kv.errors import PeerLost
from segue.kv.ids import Incarnation, LeaderId
from segue.server.balance.attempts import Attempts, Next
from segue.server.frontend.tokenizer import ModelTokenizer

PREFILL, FIRST, SECOND = (LeaderId(Incarnation(c * 32)) for c in "abc")


class CutBackend(FakeBackend):
    """Loses the worker before token `cut` of each request, and continues on another one."""

    cut: int | None = None

    async def _run(self, request: Request) -> AsyncIterator[Output]:
        attempts = Attempts(request)
        cut = self.cut
        async with aclosing(super()._run(attempts.begin(PREFILL, FIRST))) as outputs:
            async for output in outputs:
                if output.position == cut:
                    break
                yield attempts.arrived(output)
            else:
                return
        follows = attempts.failed(PeerLost("gone").info, FIRST)
        assert follows is (Next.CONTINUE if cut else Next.PLACE_AGAIN)
        again = attempts.begin(PREFILL, SECOND)
        async with aclosing(super()._run(again)) as outputs:
            async for output in outputs:
                if output.position < len(again.output):
                    continue
                if cut and output.position == len(again.output):
                    # What a worker says with its first token, whichever that is.
                    output = replace(output, timeline={"queue": 99.0})
                yield attempts.arrived(output)


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
CALL = 'so <tool_call>\n{"name": "find", "arguments": {"at": "Paris"}}\n</tool_call>'
ASK = {"messages": [{"role": "user", "content": "where"}]}
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("/v1/completions", "Paris is é and 你 there", {"prompt": "a", "max_tokens": 64}),
    "stop": (
        "/v1/completions",
        "Paris is the answer and more",
        {"prompt": "a", "max_tokens": 64, "stop": "answer", "min_tokens": 2},
    ),
    "length": ("/v1/completions", "Paris is the answer", {"prompt": "a", "max_tokens": 5}),
    "several": (
        "/v1/completions",
        "Paris is there",
        {"prompt": ["a", "bc"], "n": 2, "max_tokens": 64, "return_token_ids": True},
    ),
    "echo": (
        "/v1/completions",
        "Paris is there",
        {"prompt": "the capital", "echo": True, "logprobs": 1, "max_tokens": 64},
    ),
    "chat": ("/v1/chat/completions", "Paris is é", {**ASK, "logprobs": True, "top_logprobs": 1}),
    "tools": ("/v1/chat/completions", CALL, {**ASK, "tools": TOOLS, "return_timeline": True}),
}


def answers(running: Running, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The whole answer and the events of the stream, without what is new each time."""
    whole = running.post(path, {"model": "tiny", **body})
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = running.post(path, {"model": "tiny", **body, **options}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    found = [timeless(json.loads(event)) for event in events]
    # Several samples come in any order.
    found.sort(key=lambda event: event["choices"][0]["index"] if event["choices"] else 99)
    return timeless(whole.json()), found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("id", "created")}
    return [timeless(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", BODIES)
def test_each_answer_equals_the_undisturbed_one_wherever_it_is_cut(
    name: str, tokenizer: ModelTokenizer
) -> None:
    path, text, body = BODIES[name]
    backend = CutBackend(tokenizer, text=text)
    with serve(backend, tokenizer) as running:
        whole, events = answers(running, path, body)
        assert whole["usage"]["completion_tokens"] > 3
        last = len(tokenizer.encode(text, special=False)) + 1
        for cut in range(min(last, body.get("max_tokens", last))):
            backend.cut = cut
            assert answers(running, path, body) == (whole, events), f"cut before token {cut}"
            if cut > 20:
                break
