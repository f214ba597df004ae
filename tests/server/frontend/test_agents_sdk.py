"""OpenAI's Agents SDK, unmodified, on both of the APIs that it speaks. Skipped where it is not installed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from test_tool_calls import CALL

from conftest import FakeBackend, serve
from segue.engine.request import Output, Request
from segue.server.frontend.tokenizer import ModelTokenizer

agents = pytest.importorskip("agents", reason="pip install openai-agents")


class Conversation(FakeBackend):
    """Calls the tool first, and answers once its result is in the prompt."""

    async def _run(self, request: Request) -> AsyncIterator[Output]:
        known = "sunny there" in self.tokenizer.decode(request.prompt, skip_special=False)
        self.text = "It is sunny." if known else f"I ask. {CALL}"
        async for output in super()._run(request):
            yield output


@pytest.mark.slow
@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_an_agent_calls_its_tool_and_answers(tokenizer: ModelTokenizer, api: str, stream: bool) -> None:
    asked: list[str] = []

    async def main(url: str) -> tuple[str, int]:
        agents.set_tracing_disabled(True)

        @agents.function_tool
        def weather(city: str) -> str:
            """The weather in a city."""
            asked.append(city)
            return "sunny there"

        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model: Any = getattr(agents, api)(model="tiny", openai_client=client)
            agent = agents.Agent(name="a", instructions="Brief.", model=model, tools=[weather])
            if stream:
                run = agents.Runner.run_streamed(agent, "weather in Paris?")
                deltas = [e async for e in run.stream_events() if e.type == "raw_response_event"]
                return run.final_output, len(deltas)
            return (await agents.Runner.run(agent, "weather in Paris?")).final_output, 1

    with serve(Conversation(tokenizer), tokenizer) as running:
        answer, deltas = asyncio.run(main(running.url))
    assert (answer, asked) == ("It is sunny.", ["Paris"])
    assert deltas > (10 if stream else 0)
