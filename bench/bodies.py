"""The same request bodies to vLLM and to segue, with the same model: their answers side by side.

    python bench/bodies.py

Needs the environment of `make test-vllm`. Each server runs alone, one after the other, with a small random
model. Writes all bodies and answers, and the table, to bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import from_tests  # noqa: F401
import httpx2 as httpx
import tiny_model
from engines import PYTHON
from served import Served
from serving import running

from ports import HeldPort
from recorded import commit

RESULTS: Final = Path(__file__).resolve().parent / "results"
MODEL: Final = "tiny"
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
CONTEXT_TOKENS: Final = 2048
WAIT_S: Final = 120.0
#: Characters of an error's message in the table.
SHOWN_CHARS: Final = 140

_HELLO: Final = [{"role": "user", "content": "Say hello."}]
_CITY: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOOL: Final = {"type": "function", "function": {"name": "weather", "parameters": _CITY}}
_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY, "strict": True}}
_PICTURE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": _HELLO, "max_tokens": 4, "temperature": 0} | fields


def _text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": MODEL, "prompt": "Paris is", "max_tokens": 4, "temperature": 0} | fields


#: Fields that OpenAI documents, with good and with wrong values.
OPENAI: Final = {
    "plain chat": _chat(),
    "stop": _chat(stop=["o", "\n"]),
    "five stops": _chat(stop=["a", "b", "c", "d", "e"]),
    "n 2": _chat(n=2, temperature=1, seed=1),
    "n 0": _chat(n=0),
    "n 2 greedy": _chat(n=2),
    "logprobs": _chat(logprobs=True, top_logprobs=2),
    "top_logprobs alone": _chat(top_logprobs=2),
    "top_logprobs 21": _chat(logprobs=True, top_logprobs=21),
    "a tool, auto": _chat(tools=[_TOOL]),
    "a tool, required": _chat(
        tools=[_TOOL], tool_choice="required", max_tokens=60, parallel_tool_calls=False
    ),
    "a tool, named": _chat(
        tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=60
    ),
    "a tool that is missing": _chat(
        tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "x"}}
    ),
    "tool_choice without tools": _chat(tool_choice="required"),
    "json_object": _chat(response_format={"type": "json_object"}, max_tokens=20),
    "json_schema": _chat(response_format=_FORMAT, max_tokens=20),
    "json_schema without schema": _chat(response_format={"type": "json_schema"}),
    "response_format unknown": _chat(response_format={"type": "xml"}),
    "stream": _chat(stream=True),
    "stream with usage": _chat(stream=True, stream_options={"include_usage": True}),
    "stream_options without stream": _chat(stream_options={"include_usage": True}),
    "seed": _chat(seed=7, temperature=1),
    "temperature 3": _chat(temperature=3),
    "temperature a word": _chat(temperature="hot"),
    "top_p 0": _chat(top_p=0),
    "logit_bias": _chat(logit_bias={"100": -100, "200": 5}),
    "max_completion_tokens": _chat(max_tokens=None, max_completion_tokens=3),
    "no messages": _chat(messages=[]),
    "an image": _chat(messages=[{"role": "user", "content": [_PICTURE]}]),
    "another model": _chat(model="gpt-9"),
}
#: Fields that only vLLM documents, text completions, and names that neither documents.
VLLM: Final = {
    "plain text": _text(),
    "token ids": _text(prompt=[100, 200, 250]),
    "two prompts": _text(prompt=["Paris is", "Rome is"]),
    "an empty prompt": _text(prompt=""),
    "echo": _text(echo=True),
    "echo with logprobs, no output": _text(echo=True, logprobs=1, max_tokens=0),
    "text logprobs": _text(logprobs=2),
    "prompt_logprobs": _text(prompt_logprobs=1),
    "best_of 2": _text(best_of=2, temperature=1),
    "suffix": _text(suffix=" end"),
    "text stream": _text(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "min_tokens": _text(min_tokens=4, stop=["a"]),
    "min_tokens above max_tokens": _text(min_tokens=9),
    "ignore_eos": _text(ignore_eos=True),
    "stop_token_ids": _text(stop_token_ids=[253, 1], include_stop_str_in_output=True),
    "top_k and min_p": _text(top_k=5, min_p=0.1, temperature=1, seed=2),
    "top_k -2": _text(top_k=-2),
    "repetition_penalty 0": _text(repetition_penalty=0),
    "structured choice": _text(structured_outputs={"choice": ["Paris", "Rome"]}),
    "structured regex": _text(structured_outputs={"regex": "[ab]{3}"}),
    "structured json": _chat(structured_outputs={"json": _CITY}, max_tokens=20),
    "two structured outputs": _text(structured_outputs={"regex": "a", "choice": ["b"]}),
    "a wrong regex": _text(structured_outputs={"regex": "("}),
    "guided_choice": _text(guided_choice=["Paris", "Rome"]),
    "allowed_token_ids": _text(allowed_token_ids=[100, 200]),
    "bad_words": _text(bad_words=["city"]),
    "return_token_ids": _text(return_token_ids=True),
    "too long": _text(prompt=[100] * 9000),
    "max_tokens too large": _text(max_tokens=100_000),
    "unknown names": _text(colour="blue", use_beam=True),
}


#: Why the answers differ, where the answers themselves do not say it.
WHY: Final = {
    "five stops": "vLLM takes four; segue takes 16",
    "n 2 greedy": "two equal samples, as OpenAI gives them",
    "echo with logprobs, no output": "vLLM repeats the log-probabilities in a field of its own",
    "prompt_logprobs": "`echo` with `logprobs` gives them",
    "best_of 2": "vLLM ignores it",
    "text stream": "an event may have several tokens",
    "guided_choice": "vLLM ignores it",
    "allowed_token_ids": "not built, refused by name",
    "bad_words": "not built, refused by name",
    "unknown names": "vLLM does not list them",
}
#: Fields that all answers of one server have, and no answer of the other.
EVERYWHERE: Final = {"system_fingerprint", "usage.prompt_tokens_details.cached_tokens"}
#: Objects whose keys are tokens.
BY_TOKEN: Final = re.compile(r"(top_logprobs|prompt_logprobs)\[\]\..*")


def form(value: object, name: str = "") -> set[str]:
    """The paths of an answer's values with their types; all elements of a list are one path."""
    if isinstance(value, dict):
        return {
            path for key, inner in value.items() for path in form(inner, f"{name}.{key}" if name else key)
        }
    if isinstance(value, list):
        return {path for inner in value for path in form(inner, f"{name}[]")} or {f"{name}[]: empty"}
    return {f"{name}: {type(value).__name__}"}


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Status, error or form, and a few values of one answer."""
    answer = client.post(path, json={key: value for key, value in body.items() if value is not None})
    found: dict[str, Any] = {"status": answer.status_code}
    if unknown := answer.headers.get("x-segue-unknown-fields"):
        found["unknown"] = unknown
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        data = [line[5:].strip() for line in answer.text.splitlines() if line.startswith("data:")]
        events = [json.loads(one) for one in data if one != "[DONE]"]
        found |= {"events": len(events), "done": data[-1] == "[DONE]"}
        found["form"] = sorted({path for event in events for path in form(event)})
        return found
    try:
        value = answer.json()
    except ValueError:
        return found | {"text": answer.text[:300]}
    if answer.status_code != 200:
        error = value.get("error", value)
        return found | {"error": error, "form": sorted(form(value))}
    found["choices"] = str(value.get("choices"))[:SHOWN_CHARS]
    found["finish"] = [choice.get("finish_reason") for choice in value.get("choices", [])]
    found["output_tokens"] = (value.get("usage") or {}).get("completion_tokens")
    found["form"] = sorted(form(value))
    return found


def asked(url: str) -> dict[str, Any]:
    """The version of the server at `url`, and its answers to all bodies."""
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        version = client.get("/version").json().get("version")
        answers = {name: ask(client, path, body) for name, (path, body) in (OPENAI | VLLM).items()}
    return {"version": version, "answers": answers}


def of_vllm(model: Path, folder: Path) -> dict[str, Any]:
    """The answers of `vllm serve`."""
    port = HeldPort()
    url = f"http://127.0.0.1:{port.port}"
    command = [
        *(str(PYTHON.with_name("vllm")), "serve", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port.port), "--dtype", "float32", "--enforce-eager"),
        *("--max-num-seqs", "8", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    with running(command, "nobind", folder / "vllm.log", url) as server:
        server.ready()
        return asked(url)


def of_segue(model: Path) -> dict[str, Any]:
    """The answers of `segue serve`."""
    flags = ("--served-model-name", MODEL, "--dtype", "float32", "--kv-gib", "0.1", "--port", "0")
    with Served("--model", str(model), *flags) as served:
        return asked(served.url)


def said(answer: dict[str, Any]) -> str:
    """One answer in one cell of a table."""
    error = answer.get("error")
    if error is not None or "text" in answer:
        message = error.get("message", error) if isinstance(error, dict) else error or answer["text"]
        line = " ".join(str(message).split())
        line = line if len(line) <= SHOWN_CHARS else line[:SHOWN_CHARS] + "…"
        return f"{answer['status']}: " + re.sub(r"[|<>`]", lambda found: "\\" + found[0], line)
    if "events" in answer:
        return f"{answer['status']}, {answer['events']} events" + ("" if answer["done"] else ", no [DONE]")
    ended = ", ".join(map(str, answer["finish"]))
    ignored = f"; ignored: {answer['unknown']}" if "unknown" in answer else ""
    return f"{answer['status']}, {answer['output_tokens']} tokens, {ended}{ignored}"


def only(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The fields of an answer that the other one does not have; null counts as absent."""
    names = [
        {BY_TOKEN.sub(r"\1[]", path).partition(":")[0] for path in answer["form"] if "NoneType" not in path}
        for answer in (one, other)
    ]
    return ", ".join(f"`{name}`" for name in sorted(names[0] - names[1] - EVERYWHERE))


def table(found: dict[str, Any]) -> str:
    """Both servers' answers as Markdown."""
    vllm, segue = found["vllm"], found["segue"]
    lines = [
        f"# Request bodies: vLLM {vllm['version']} and segue",
        "",
        f"`{found['command']}` at {found['commit']}. `bodies.json` has the bodies and the answers' fields.",
        "The columns of fields list those that are set in one answer alone. All answers of vLLM have",
        "`system_fingerprint`, all of segue `cached_tokens`. An error's `code` is a number in vLLM, and a",
        "name in segue.",
    ]
    for title, group in (("Fields of OpenAI", OPENAI), ("Text completions and fields of vLLM", VLLM)):
        lines += [
            "",
            f"## {title}",
            "",
            "| body | vLLM | segue | only vLLM | only segue | why |",
            "|---|---|---|---|---|---|",
        ]
        for name in group:
            one, other = vllm["answers"][name], segue["answers"][name]
            good = one["status"] == other["status"] == 200
            differs = "" if one["status"] == other["status"] else "**"
            fields = f"{only(one, other)} | {only(other, one)}" if good else " | "
            row = f"{differs}{name}{differs} | {said(one)} | {said(other)} | {fields} | {WHY.get(name, '')}"
            lines.append(f"| {row} |")
    equal = sum(one["status"] == segue["answers"][name]["status"] for name, one in vllm["answers"].items())
    lines += [
        "",
        f"The status is the same for {equal} of {len(vllm['answers'])} bodies; **bold** where it differs.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--table", action="store_true", help="write the table again, from bodies.json")
    parser.add_argument("--segue", action="store_true", help="ask segue again; vLLM's answers of bodies.json")
    args = parser.parse_args()
    file = RESULTS / "bodies.json"
    found: dict[str, Any] = json.loads(file.read_text()) if args.table or args.segue else {}
    if not args.table:
        with TemporaryDirectory() as made:
            folder = Path(made)
            model = save_model(folder / "model")
            found |= {"command": "python bench/bodies.py", "commit": commit(), "load": os.getloadavg()}
            if not args.segue:
                found["vllm"] = of_vllm(model, folder)
            found["segue"] = of_segue(model)
        found["bodies"] = {
            name: {"path": path, "body": body} for name, (path, body) in (OPENAI | VLLM).items()
        }
        file.write_text(json.dumps(found, indent=1) + "\n")
    text = table(found)
    file.with_suffix(".md").write_text(text)
    print(text)


def save_model(folder: Path) -> Path:
    """The tests' model with heads of the least size that vLLM's CPU attention takes, and a chat template."""
    tiny_model.save(folder, hidden_size=128, max_position_embeddings=CONTEXT_TOKENS)
    (folder / "chat_template.jinja").write_text(tiny_model.TEMPLATE)
    return folder


if __name__ == "__main__":
    main()
