"""A conversation of three turns, each with two calls of a tool, in the clients of other projects.

    python three_turns.py URL NAME: prints the three answers as JSON

Run by the Python that has the client; only `openai` and `anthropic` are in that of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import openai

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION = {"name": "look", "description": "Look at a place.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def question(turn: int) -> str:
    return f"turn {turn}: look twice"


def look(place: str) -> str:
    """Look at a place."""
    return f"{1000 + int(place[0])}{place[1]}"


def chat(ask: Callable[[list[Any]], Any]) -> list[str]:
    """The three answers over chat; `ask` gives the message that answers others."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    answers: list[str] = []
    for turn in (1, 2, 3):
        messages.append({"role": "user", "content": question(turn)})
        while len(answers) < turn:
            message = ask(messages)
            messages.append(message.model_dump())
            for call in message.tool_calls or []:
                result = look(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                answers.append(message.content)
    return answers


def openai_chat(url: str, *, stream: bool = False) -> list[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def ask(messages: list[Any]) -> Any:
            asked: Any = {"model": "tiny", "messages": messages, "tools": [TOOL]}
            if not stream:
                return client.chat.completions.create(**asked).choices[0].message
            with client.chat.completions.stream(**asked) as events:
                return events.get_final_completion().choices[0].message

        return chat(ask)


def openai_responses(url: str, *, stream: bool = False) -> list[str]:
    items: list[Any] = []
    answers = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in (1, 2, 3):
            items.append({"role": "user", "content": question(turn)})
            while len(answers) < turn:
                asked: Any = {"model": "tiny", "input": items, "instructions": "Be brief.", "store": False}
                asked["tools"] = [{"type": "function", **FUNCTION}]
                if stream:
                    with client.responses.stream(**asked) as events:
                        response: Any = events.get_final_response()
                else:
                    response = client.responses.create(**asked)
                items += [item.to_dict() for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                for call in calls:
                    result = look(**json.loads(call.arguments))
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
                if not calls:
                    answers.append(response.output_text)
    return answers


def anthropic_messages(url: str, *, stream: bool = False) -> list[str]:
    messages: list[Any] = []
    answers = []
    tools = [{"name": "look", "description": FUNCTION["description"], "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for turn in (1, 2, 3):
            messages.append({"role": "user", "content": question(turn)})
            while len(answers) < turn:
                asked: Any = {"model": "tiny", "max_tokens": 300, "messages": messages, "tools": tools}
                asked["system"] = [{"type": "text", "text": "Be brief."}]
                if stream:
                    with client.messages.stream(**asked) as events:
                        message: Any = events.get_final_message()
                else:
                    message = client.messages.create(**asked)
                messages.append({"role": "assistant", "content": message.content})
                calls = [block for block in message.content if block.type == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)}
                    for call in calls
                ]
                if results:
                    messages.append({"role": "user", "content": results})
                else:
                    answers.append(message.content[-1].text)
    return answers


def agents_sdk(url: str, *, api: str) -> list[str]:
    import agents

    agents.set_tracing_disabled(True)

    async def ask() -> list[str]:
        answers: list[str] = []
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = getattr(agents, api)(model="tiny", openai_client=client)
            agent = agents.Agent(
                name="a", instructions="Be brief.", model=model, tools=[agents.function_tool(look)]
            )
            items: list[Any] = []
            for turn in (1, 2, 3):
                items.append({"role": "user", "content": question(turn)})
                run = agents.Runner.run_streamed(agent, items)
                async for _ in run.stream_events():
                    pass
                items = run.to_input_list()
                answers.append(run.final_output)
        return answers

    return asyncio.run(ask())


def langchain(url: str, *, responses: bool) -> list[str]:
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=responses
    ).bind_tools([TOOL])
    messages: list[Any] = []
    answers: list[str] = []
    for turn in (1, 2, 3):
        messages.append(("user", question(turn)))
        while len(answers) < turn:
            message = chat.invoke(messages)
            messages.append(message)
            calls = message.tool_calls
            messages += [ToolMessage(look(**call["args"]), tool_call_id=call["id"]) for call in calls]
            if not message.tool_calls:
                answers.append(message.text)
    return answers


def litellm(url: str, *, provider: str) -> list[str]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks for prices over the network
    import litellm

    there = {"model": f"{provider}/tiny", "api_base": url if provider == "anthropic" else f"{url}/v1"}

    def ask(messages: list[Any]) -> Any:
        answer = litellm.completion(**there, api_key="none", messages=messages, tools=[TOOL])
        return answer.choices[0].message

    return chat(ask)


#: Clients in the environment of the tests.
OWN: dict[str, Callable[[str], list[str]]] = {
    "openai, chat": openai_chat,
    "openai, chat, streamed": lambda url: openai_chat(url, stream=True),
    "openai, responses": openai_responses,
    "openai, responses, streamed": lambda url: openai_responses(url, stream=True),
    "anthropic": anthropic_messages,
    "anthropic, streamed": lambda url: anthropic_messages(url, stream=True),
}
#: Clients of `make clients`, by the package that each process imports once.
OTHERS: dict[str, dict[str, Callable[[str], list[str]]]] = {
    "agents": {
        "chat": lambda url: agents_sdk(url, api="OpenAIChatCompletionsModel"),
        "responses": lambda url: agents_sdk(url, api="OpenAIResponsesModel"),
    },
    "langchain": {
        "chat": lambda url: langchain(url, responses=False),
        "responses": lambda url: langchain(url, responses=True),
    },
    "litellm": {
        provider: lambda url, provider=provider: litellm(url, provider=provider)  # type: ignore[misc]
        for provider in ("openai", "hosted_vllm", "anthropic")
    },
}

if __name__ == "__main__":
    json.dump({api: ask(sys.argv[1]) for api, ask in OTHERS[sys.argv[2]].items()}, sys.stdout)
