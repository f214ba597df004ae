"""Targets at the HTTP doors, in the settings, and in what a frontend reads from its instances."""

from __future__ import annotations

import asyncio
import atexit
import json
import tempfile
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
import msgspec
from fuzz_changes import Draw, Target, changed_json
from fuzz_peers import outputs_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from segue.cli import flags
from segue.cli.flags import KNOWN, add_settings
from segue.engine.request import Output, Request, SamplingParams
from segue.kv.errors import ErrorCode
from segue.kv.ids import Incarnation, Role
from segue.kv.io import MonotonicClock
from segue.kv.limits import Limits
from segue.server.frontend.body_forms import check_levels
from segue.server.frontend.body_reader import Body, read_body
from segue.server.frontend.call_families import FAMILIES
from segue.server.frontend.generate import Sample
from segue.server.frontend.params import ModelCard, Text
from segue.server.frontend.plan import Planner
from segue.server.frontend.request_fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import call_parser
from segue.server.registry.backends import BoundedClient
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceList, InstanceRecord, ReplicaRecord, RoomRecord
from segue.server.registry.registry_server import registry_app
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import StoreBackend
from segue.server.settings.commands import COMMANDS, FrontendConfig, InstanceConfig, ServeConfig
from segue.server.settings.layers import Layers, build, parse_toml

T = TypeVar("T")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _run(work: Coroutine[Any, Any, T]) -> T:
    return _loop().run_until_complete(work)


# ---- the registry -------------------------------------------------------------------------------

RECORD = InstanceRecord(
    incarnation=Incarnation("a" * 32),
    role=Role.PREFILL,
    model="m",
    served_model="m",
    context_tokens=512,
    replicas=[ReplicaRecord(dp_rank=0, host="127.0.0.1", port=9)],
)


def _registry(data: bytes) -> str:
    """First line: method and path; the rest is the body."""
    line, _, body = data.partition(b"\n")
    method, _, path = line.decode("latin-1").partition(" ")

    async def ask() -> str:
        store = RegistryStore(MonotonicClock(), ttl_s=10.0)
        backend = StoreBackend(store)
        app = registry_app(backend, None)
        store.register(RECORD, 0)
        said: list[Any] = []

        bodies = [body]

        async def receive() -> Any:
            if not bodies:
                await asyncio.Event().wait()  # the client stays, and says no more
            bodies.clear()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method[:20] or "GET",
            "path": "/" + target.lstrip("/"),
            "raw_path": target.encode("utf-8", "replace"),
            "query_string": query.replace("wait_s=", "wait=").encode("utf-8", "replace"),
            "headers": [],
            "client": ("127.0.0.1", 1),
            "scheme": "http",
            "server": ("127.0.0.1", 2),
            "root_path": "",
        }
        await app(scope, receive, send)  # type: ignore[arg-type]
        await backend.close()
        status = said[0]["status"]
        assert status < 500 or status == 504, f"{status}: {said[1:]}"
        store.instances()
        return f"{status} {said[1]['body'][:30]!r}" if status != 200 else f"200 {target[:20]}"

    return _run(ask())


def _registry_seeds() -> list[bytes]:
    rank = f"PUT v1/instances/{RECORD.incarnation}/ranks/0\n".encode()
    room = msgspec.json.encode(RoomRecord(incarnation=RECORD.incarnation, dp_rank=0, ttl_s=5.0))
    return [
        rank + msgspec.json.encode(RECORD),
        f"PUT v1/instances/{RECORD.incarnation}/draining\n".encode() + b'{"draining": true}',
        f"DELETE v1/instances/{RECORD.incarnation}\n".encode(),
        b"PUT v1/rooms/5\n" + room,
        b"GET v1/rooms/5?x=1\n",
        b"GET v1/instances?role=prefill&version=3\n",
        b"GET v1/health\n",
    ]


def _registry_change(draw: Draw, data: bytes) -> bytes:
    line, _, body = data.partition(b"\n")
    return line + b"\n" + changed_json(draw, body or b"{}")


def _answer(data: bytes) -> str:
    """An answer of a registry to its client: the first byte chooses the status."""
    status = (200, 200, 400, 409, 503, 302)[data[0] % 6] if data else 200

    async def ask() -> str:
        def reply(request: httpx.Request) -> httpx.Response:
            return httpx.Response(status, content=data[1:])

        client = RegistryClient("http://127.0.0.1:1", secret=b"s" * 16, limits=Limits())
        door: Any = client.backend
        await door._client.aclose()
        door._client = BoundedClient(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(reply))
        try:
            found = await door.instances(None, None, 0.0)
            return f"{len(found.instances)} instances"
        finally:
            await client.aclose()

    return _run(ask())


def _answer_seeds() -> list[bytes]:
    listed = InstanceList(version=3, epoch="e", age_s=1.0, instances=[RECORD])
    error = {"error": {"code": ErrorCode.DP_RANK_CONFLICT, "text": "no", "room": 3}}
    return [b"\0" + msgspec.json.encode(listed), b"\x03" + msgspec.json.encode(error), b"\x05"]


def _answer_change(draw: Draw, data: bytes) -> bytes:
    return data[:1] + changed_json(draw, data[1:] or b"{}")


# ---- the frontend -------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}"
    "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CARD = ModelCard(name="m", context_tokens=4096, vocab_size=300)


@cache
def _tokenizer() -> ModelTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", bos_token="<bos>")
    fast.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return ModelTokenizer.load(Path(folder))


def _body(data: bytes, kind: type[Body]) -> Body:
    """The body as a door reads it."""
    check_levels(data)
    return read_body(data, kind)


def _chat(data: bytes) -> str:
    plan = Planner(_tokenizer()).chat(_body(data, ChatBody), CARD, "id")
    for sample in plan.samples:
        msgspec.msgpack.encode(sample.request)
    return f"{min(len(plan.samples), 3)} {plan.stream}"


def _completion(data: bytes) -> str:
    plan = Planner(_tokenizer()).completion(_body(data, CompletionBody), CARD, "id")
    for sample in plan.samples:
        msgspec.msgpack.encode(sample.request)
    return f"{min(len(plan.samples), 3)} {plan.stream}"


def _tokenize(data: bytes) -> str:
    body = _body(data, TokenizeBody if b"tokens" not in data else DetokenizeBody)
    return type(body).__name__


def _bodies(*bodies: dict[str, Any]) -> list[bytes]:
    return [json.dumps(body).encode() for body in bodies]


COMMON: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 1,
    "n": 2,
    "stop": ["x", "yz"],
    "stop_token_ids": [3],
    "logit_bias": {"5": 1.5},
    "min_tokens": 1,
    "presence_penalty": 0.1,
    "stream": True,
    "stream_options": {"include_usage": True},
    # What somebody else's router adds: never an address to contact.
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 77,
    "routed_dp_rank": 1,
    "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 1, "do_remote_prefill": True},
}


def _chat_seeds() -> list[bytes]:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    return _bodies(
        {"messages": messages},
        COMMON | {"messages": messages, "logprobs": True, "top_logprobs": 2},
        {"messages": parts, "tools": [tool], "tool_choice": "auto"},
        {
            "messages": messages,
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        {"messages": messages, "response_format": schema, "max_completion_tokens": 3},
        {"messages": messages, "guided_regex": "a+", "chat_template_kwargs": {"x": 1}},
    )


def _completion_seeds() -> list[bytes]:
    return _bodies(
        {"prompt": "hello"},
        COMMON | {"prompt": [1, 2, 3], "logprobs": 2},
        {"prompt": ["a", "b"], "echo": True, "logprobs": 1},
        {"prompt": [[1, 2], [3]], "guided_choice": ["a", "b"], "best_of": 1},
        {"prompt": "x", "structured_outputs": {"json": {"type": "object"}}},
    )


def _outputs(outputs: list[Output]) -> str:
    tokenizer = _tokenizer()
    request = Request(request_id="r0", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=8))
    sample = Sample(request, Text(stops=("zz",)), tokenizer)
    told = []
    for output in outputs[:50]:
        if output.error is not None:
            told.append(str(output.error.exception().info.code))
            continue
        piece = sample.feed(output)
        told.append(f"{len(piece.token_ids) > 0} {piece.finish}")
    return " ".join(told[:4])


def _tools(data: bytes) -> str:
    text, found = data.decode("utf-8", "replace"), set[str]()
    for family in FAMILIES:
        parser, parts = call_parser(family, {"f": {}, "g": {}}), []
        for at in range(0, len(text), 7):
            parts += parser.feed(text[at : at + 7])
        parts += parser.finish()
        assert len(parts) <= len(text) + 1
        found |= {type(part).__name__ for part in parts}
    return " ".join(sorted(found))


TOOL_SEEDS = [
    b"<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call>",
    b"[f(a=[1, 'x'], b={'c': None}), g()]",
    b"<|tool_call_start|>[f(a=-1)]<|tool_call_end|> text",
    b'text <tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call> more',
    b'[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    b'[TOOL_CALLS]f[ARGS]{"a": 1}',
    b'{"name": "f", "parameters": {"a": null}}',
    b'<|python_tag|>{"name": "f", "parameters": {}}',
]


# ---- settings -----------------------------------------------------------------------------------


def _toml(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    file = parse_toml(text, "f.toml")
    told = []
    for command, cls in (("serve", ServeConfig), ("decode", InstanceConfig), ("frontend", FrontendConfig)):
        fixed = {"role": Role.DECODE} if cls is InstanceConfig else {}
        config = build(cls, Layers(file=file, file_name="f.toml"), command=command, known=KNOWN, fixed=fixed)
        told.append(type(config).__name__)
    return " ".join(told)


TOML_SEEDS = [
    b'model = "m"\nregistry = "http://127.0.0.1:1"\npage_tokens = 16\nkv_gib = 0.5\n[serve]\nport = 1\n',
    b'model = "m"\nregistry = "https://h:1"\ntls_cert = "a"\ntls_key = "b"\ntls_ca = "c"\n[decode]\ndp = 1\n',
    b"[serve]\nunified = true\nrequest_budget_s = 1e3\n",
]


def _environ(data: bytes) -> str:
    """NAME=VALUE lines."""
    pairs = (line.partition("=") for line in data.decode("utf-8", "replace").split("\n"))
    environ = {name: value for name, _, value in pairs if "\0" not in name}
    layers = Layers(environ=environ)
    serve = build(ServeConfig, layers, command="serve", known=KNOWN)
    return f"{serve.transport} {serve.unified}"


ENVIRON_SEEDS = [
    b"SEGUE_PORT=1\nSEGUE_KV_GIB=0.5\nSEGUE_UNIFIED=yes\nPATH=/bin",
    b"SEGUE_PREFILL=2\nSEGUE_TRANSPORT=tcp\nSEGUE_DRAIN_S=1.5\nSEGUE_MODEL=m",
    b"SEGUE_TLS_CERT=a\nSEGUE_TLS_KEY=b\nSEGUE_TLS_CA=c",
]


def _words(data: bytes) -> str:
    parser = flags.Parser(prog="segue serve")
    add_settings(parser, COMMANDS["serve"])
    words = data.decode("utf-8", "replace").split("\n")
    if {"-h", "--help"} & set(words):
        return "help"
    args, rest = parser.parse_known_args(words)
    if rest:
        raise flags.unknown(parser, rest)
    found = {key: getattr(args, key) for key in KNOWN["serve"]}
    return type(build(ServeConfig, Layers(flags=found), command="serve", known=KNOWN)).__name__


TARGETS: list[Target] = [
    Target("registry_query", _registry_seeds, _registry, _registry_change),
    Target("registry_answer", _answer_seeds, _answer, _answer_change),
    Target("openai_chat", _chat_seeds, _chat, changed_json),
    Target("openai_completion", _completion_seeds, _completion, changed_json),
    Target(
        "openai_tokenize",
        lambda: _bodies({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}, {"tokens": [1]}),
        _tokenize,
        changed_json,
    ),
    outputs_target(_outputs),
    Target("tool_calls", lambda: TOOL_SEEDS, _tools),
    Target("settings_file", lambda: TOML_SEEDS, _toml, found=(b"a = " + b"[" * 5000,)),
    Target("settings_environ", lambda: ENVIRON_SEEDS, _environ),
    Target(
        "settings_words", lambda: [b"--port\n1\n--unified", b"--kv-gib=1\n--tls-cert=a", b"--model"], _words
    ),
]
