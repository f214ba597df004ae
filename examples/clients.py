"""Asks a running server with clients of other projects, unmodified, and checks their answers.

    make clients
    .venv/clients/bin/python examples/clients.py http://127.0.0.1:8000 litellm

Each function is one client. It prints one line for each thing that worked, and raises at the first that did
not. Grammars force calls and objects, so that a model of any size gives them. Without names all clients of
`make clients` run; `lm_eval` needs an environment of its own (`pip install 'lm_eval[api]'`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

QUESTION = "What is the capital of France?"
ASK = [{"role": "user", "content": QUESTION}]
WAIT_S = 300.0
#: Enough for every call and object here, also from a model that writes one byte a token.
LONG = 800


class City(Enum):
    PARIS = "Paris"
    ROME = "Rome"


class Answer(BaseModel):
    """An answer that has few forms."""

    model_config = ConfigDict(extra="forbid")
    city: City
    sure: bool


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def arguments(given: str | dict[str, object]) -> dict[str, object]:
    """The arguments of a call of `weather`, which follow its schema."""
    found = json.loads(given) if isinstance(given, str) else given
    assert found in ({"city": "Paris"}, {"city": "Rome"}), found
    return found


def show(what: str, value: object) -> None:
    print(f"  {what}: {value!r}", flush=True)


def use_openai(url: str, model: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    assert model in [listed.id for listed in client.models.list()]
    answer = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert answer.usage.completion_tokens <= 8
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    show("chat", answer.choices[0].message.content)
    usage = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=model, messages=ASK, max_tokens=8, stream=True, stream_options=usage
        )
    )
    assert chunks[-1].usage is not None
    show("chat, streamed", "".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    text = client.completions.create(
        model=model, prompt=["Paris is", "Rome is"], max_tokens=4, echo=True, logprobs=1
    )
    assert len(text.choices) == 2
    show("completions", [choice.text for choice in text.choices])
    parsed = client.chat.completions.parse(model=model, messages=ASK, response_format=Answer, max_tokens=LONG)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    show("parse", parsed.choices[0].message.parsed)
    called = client.chat.completions.create(
        model=model,
        messages=ASK,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=LONG,
    )
    show("a call", arguments(called.choices[0].message.tool_calls[0].function.arguments))
    made = client.responses.create(model=model, input=QUESTION, max_output_tokens=8)
    show("responses", made.output_text)
    with client.responses.stream(
        model=model, input=QUESTION, text_format=Answer, max_output_tokens=LONG
    ) as stream:
        kinds = [event.type for event in stream]
        assert kinds[-1] == "response.completed"
        show("responses, parsed", stream.get_final_response().output_parsed)
    try:
        client.chat.completions.create(model="other", messages=ASK)
    except openai.NotFoundError as exc:
        show("an error", exc.code)
    else:
        raise AssertionError("another model was served")


def use_anthropic(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S)
    assert client.messages.count_tokens(model=model, messages=ASK).input_tokens > 0
    answer = client.messages.create(model=model, max_tokens=8, messages=ASK, system="Be brief.")
    show("messages", answer.content[0].text)
    with client.messages.stream(model=model, max_tokens=8, messages=ASK) as stream:
        show("messages, streamed", "".join(stream.text_stream))
    tool = {"name": "weather", "input_schema": SCHEMA}
    called = client.messages.create(
        model=model,
        max_tokens=LONG,
        messages=ASK,
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert called.stop_reason == "tool_use"
    show("a call", arguments(called.content[-1].input))


def use_agents(url: str, model: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: City) -> str:
        """The weather in a city."""
        return f"sunny in {city.value}"

    async def ask() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        ) as client:
            for api in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
                backend = api(model=model, openai_client=client)
                forced = agents.ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, max_tokens=LONG
                )
                caller = agents.Agent(
                    name="a",
                    model=backend,
                    tools=[weather],
                    model_settings=forced,
                    tool_use_behavior="stop_on_first_tool",
                )
                show(f"{api.__name__}, a tool", (await agents.Runner.run(caller, QUESTION)).final_output)
                typed = agents.Agent(name="b", model=backend, output_type=Answer)
                run = agents.Runner.run_streamed(typed, QUESTION)
                async for _ in run.stream_events():
                    pass
                assert isinstance(run.final_output, Answer)
                show(f"{api.__name__}, an object, streamed", run.final_output)

    asyncio.run(ask())


def use_litellm(url: str, model: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks GitHub, in vain without internet
    import litellm

    litellm.suppress_debug_info = True
    common = {"api_key": "none", "timeout": WAIT_S, "num_retries": 0}
    here = common | {"model": f"openai/{model}", "api_base": f"{url}/v1"}
    chunks = list(litellm.completion(**here, messages=ASK, max_tokens=8, stream=True))
    show("openai, streamed", "".join(c.choices[0].delta.content or "" for c in chunks))
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": LONG}
    called = litellm.completion(**here, messages=ASK, **forced)
    show("openai, a call", arguments(called.choices[0].message.tool_calls[0].function.arguments))
    parsed = litellm.completion(**here, messages=ASK, response_format=Answer, max_tokens=LONG)
    show("openai, an object", Answer.model_validate_json(parsed.choices[0].message.content))
    made = litellm.responses(**here, input=QUESTION, max_output_tokens=8)
    show("openai, responses", made.output[-1].content[0].text)
    for provider, base in (("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        there = common | {"model": f"{provider}/{model}", "api_base": base}
        answer = litellm.completion(**there, messages=ASK, max_tokens=8)
        show(provider, answer.choices[0].message.content)
    text = here | {"model": f"text-completion-openai/{model}"}
    show("completions", litellm.text_completion(**text, prompt="Paris", max_tokens=4).choices[0].text)


def use_langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    common = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": WAIT_S}
    for responses in (False, True):
        name = "responses" if responses else "chat"
        chat = ChatOpenAI(**common, max_tokens=8, use_responses_api=responses)
        show(name, chat.invoke(QUESTION).text)
        show(f"{name}, streamed", "".join(chunk.text for chunk in chat.stream(QUESTION)))
        longer = ChatOpenAI(**common, max_tokens=LONG, use_responses_api=responses)
        called = longer.bind_tools([TOOL], tool_choice="weather").invoke(QUESTION)
        show(f"{name}, a call", arguments(called.tool_calls[0]["args"]))
        for method in ("json_schema", "function_calling"):
            typed = longer.with_structured_output(Answer, method=method)
            answer = typed.invoke(QUESTION)
            assert isinstance(answer, Answer)
            show(f"{name}, {method}", answer)
    chat = ChatOpenAI(**common, max_tokens=4)
    show("a batch", [answer.text for answer in chat.batch([QUESTION, "And of Italy?"])])
    show("completions", OpenAI(**common, max_tokens=4).invoke("Paris is"))


def use_instructor(url: str, model: str) -> None:
    import instructor
    import openai

    # Mode.JSON forces an object, not its fields: that needs a larger model.
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        answer = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=model, messages=ASK, response_model=Answer, max_retries=0, max_tokens=LONG
        )
        assert isinstance(answer, Answer)
        show(mode.value, answer)


def use_open_webui(url: str, model: str) -> None:
    """The calls of Open WebUI 0.12.4 (`routers/openai.py`, `routers/tasks.py`, `utils/middleware.py`) without
    the application: the list of models, a chat with native tools, their results, a title, and a chat over a
    connection of the type `responses`."""
    import httpx2 as httpx

    spec = FUNCTION | {"type": "function"}
    asked = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
    tools = [{"type": "function", "function": spec}]
    headers = {"Authorization": "Bearer none"}
    with httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=WAIT_S) as client:
        assert model in [listed["id"] for listed in client.get("/models").json()["data"]]
        system = {"role": "system", "content": "Be brief."}
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        past = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        for name, messages in (("a chat", [system, *ASK]), ("results of tools", [system, *ASK, *past])):
            chunks = streamed(client, "/chat/completions", asked | {"messages": messages, "tools": tools})
            assert chunks[-1]["usage"]["completion_tokens"] <= 8
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
            show(name, "".join(delta.get("content") or "" for delta in deltas))
        title = {"model": model, "messages": ASK, "stream": False, "max_tokens": 8}
        answer = client.post("/chat/completions", json=title).raise_for_status().json()
        show("a title", answer["choices"][0]["message"]["content"])
        said = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
        body = {
            "model": model,
            "stream": True,
            "max_output_tokens": 8,
            "input": said,
            "instructions": "Be brief.",
        }
        events = streamed(client, "/responses", body | {"tools": [spec | {"strict": False}]})
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        show("responses", "".join(texts))


def streamed(client: Any, path: str, body: dict[str, object]) -> list[dict[str, Any]]:
    """The data of all events of an answer."""
    with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


TASK = """\
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
DOCUMENTS = (
    {"country": "France", "choices": ["Paris", "Rome", "Oslo"], "label": 0},
    {"country": "Italy", "choices": ["Paris", "Rome", "Oslo"], "label": 1},
)


def use_lm_eval(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = folder / "capitals.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
        (folder / "capitals.yaml").write_text(TASK.format(file=data))
        settings = {
            "model": model,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": 2,
            "max_retries": 1,
        }
        words = ["--model", "local-completions", "--tasks", "capitals", "--include_path", str(folder)]
        words += ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
        command = [sys.executable, "-m", "lm_eval", *words, "--output_path", str(folder / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        [file] = (folder / "out").rglob("results_*.json")
        show("capitals", json.loads(file.read_text())["results"]["capitals"])


CLIENTS = {
    "openai": use_openai,
    "anthropic": use_anthropic,
    "agents": use_agents,
    "litellm": use_litellm,
    "langchain": use_langchain,
    "instructor": use_instructor,
    "open_webui": use_open_webui,
    "lm_eval": use_lm_eval,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("client", nargs="*", help=", ".join(CLIENTS))
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    for name in args.client or [name for name in CLIENTS if name != "lm_eval"]:
        print(f"{name}:", flush=True)
        began = time.monotonic()
        CLIENTS[name](args.url.rstrip("/"), args.model)
        print(f"{name} works ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
