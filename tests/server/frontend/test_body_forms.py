"""Bodies before they are decoded: compressed ones, and those that are nested too deeply."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from frontend_rig import FakeBackend, Running, serve
from hypothesis import given
from hypothesis import strategies as st

from segue.kv.limits import Limits
from segue.server.frontend.body_forms import MAX_LEVELS, MAX_MEMBERS, check_levels
from segue.server.frontend.problems import BadParam
from segue.server.frontend.tokenizer import ModelTokenizer

HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
}


# ---- Content-Encoding ---------------------------------------------------------------------------


def in_two(raw: bytes) -> bytes:
    """gzip's form has members; their contents follow one another."""
    return gzip.compress(raw[:9], mtime=0) + gzip.compress(raw[9:])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("x-gzip", in_two),
        ("deflate", zlib.compress),
        ("identity", bytes),
        ("", bytes),
    ],
)
def test_a_compressed_body_is_read(door: Running, path: str, encoding: str, pack: Any) -> None:
    """It was called broken JSON."""
    raw = pack(json.dumps(BODIES[path]).encode())
    answer = door.post(path, raw, headers={"content-encoding": encoding})
    assert answer.status_code == 200, answer.text
    assert door.on_loop(lambda: door.door.memory.used_bytes) == 0


@pytest.mark.parametrize(
    ("encoding", "raw", "status", "text"),
    [
        ("zstd", b"(\xb5/\xfd", 415, "Content-Encoding: 'zstd'"),
        ("br", b"x", 415, "Content-Encoding: 'br'"),
        ("gzip, gzip", b"x", 415, "Content-Encoding: 'gzip, gzip'"),
        ("gzip", b'{"messages":[]}', 400, "Content-Encoding"),
        ("gzip", gzip.compress(b"{}" * 99, mtime=0)[:-9], 400, "Content-Encoding"),
        ("deflate", zlib.compress(b"{}" * 99)[:9], 400, "Content-Encoding"),
        ("gzip", b"", 400, "JSON"),
        ("gzip", gzip.compress(b" " * (2**20 + 1), mtime=0), 413, "1048576 bytes when it is decompressed"),
        ("gzip", gzip.compress(b" " * 2**19, mtime=0) * 3, 413, "1048576 bytes when it is decompressed"),
        ("gzip", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), 400, "JSON"),
        # Empty members of 20 bytes each: a body of 8 MiB took minutes of CPU.
        (
            "gzip",
            gzip.compress(b"", mtime=0) * MAX_MEMBERS + gzip.compress(b"{}", mtime=0),
            400,
            "256 members",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_compressed_body_that_cannot_be_read_says_why(
    door: Running, path: str, encoding: str, raw: bytes, status: int, text: str
) -> None:
    answer = door.post(path, raw, headers={"content-encoding": encoding})
    assert answer.status_code == status
    told = answer.json()
    assert text in told["error"]["message"]
    assert ("type" in told) is (path == MESSAGES), "in the form of its API"
    assert door.on_loop(lambda: door.door.memory.used_bytes) == 0


def test_a_body_that_unpacks_to_much_is_unpacked_no_further(tokenizer: ModelTokenizer) -> None:
    raw = gzip.compress(b" " * 2**27, mtime=0)
    with serve(FakeBackend(tokenizer), tokenizer, limits=Limits(max_body_bytes=2**18, drain_s=2)) as running:
        answer = running.post(CHAT, raw, headers={"content-encoding": "gzip"})
    assert answer.status_code == 413


# ---- levels -------------------------------------------------------------------------------------


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


ASKS = "{'messages':[{'role':'user','content':'hi'}],"
TOOL = ASKS + "'tools':[{'type':'function','function':{'name':'f'"
CALL = "{'id':'a','type':'function','function':{'name':'f','arguments':~}}"
#: Where a client's JSON may be nested: the path, and the body, in which it stands for ~.
PLACES = {
    "template": (CHAT, ASKS + "'chat_template_kwargs':{'x':~}}"),
    "metadata": (CHAT, ASKS + "'metadata':~}"),
    "unknown field": (CHAT, ASKS + "'nobody':~}"),
    "choice": (CHAT, TOOL + "}}],'tool_choice':~}"),
    "parameters": (CHAT, TOOL + ",'parameters':~}}]}"),
    "strict parameters": (CHAT, TOOL + ",'strict':true,'parameters':~}}]}"),
    "past call": (CHAT, "{'messages':[{'role':'assistant','tool_calls':[" + CALL + "]}]}"),
    "message": (CHAT, "{'messages':[{'role':'user','content':'hi','x':~}]}"),
    "schema": (CHAT, ASKS + "'guided_json':~}"),
    "schema as text": (CHAT, ASKS + "'guided_json':'~'}"),
    "SGLang's schema as text": (CHAT, ASKS + "'json_schema':'~'}"),
    "vLLM's schema as text": (CHAT, ASKS + "'structured_outputs':{'json':'~'}}"),
    "completion": ("/v1/completions", "{'prompt':'x','guided_json':~}"),
    "response's metadata": (RESPONSES, "{'input':'x','metadata':~}"),
    "response's choice": (RESPONSES, "{'input':'x','tool_choice':~}"),
    "response's format": (
        RESPONSES,
        "{'input':'x','text':{'format':{'type':'json_schema','name':'x','schema':~}}}",
    ),
    "message's metadata": (MESSAGES, ASKS + "'max_tokens':2,'metadata':~}"),
    "message's tool": (MESSAGES, ASKS + "'max_tokens':2,'tools':[{'name':'f','input_schema':~}]}"),
    "tokenize": ("/tokenize", ASKS + "'chat_template_kwargs':{'x':~}}"),
}


@pytest.mark.parametrize("place", PLACES)
def test_json_that_is_nested_too_deeply_is_a_400_wherever_it_stands(door: Running, place: str) -> None:
    """About 980 levels were a 500 in some places, 500 a strange message of the template in others."""
    path, body = PLACES[place]
    for levels, refused in ((MAX_LEVELS - 8, False), (MAX_LEVELS + 1, True), (980, True), (20_000, True)):
        text = nested(levels)
        made = body.replace("'", '"').replace('"~"', json.dumps(text)).replace("~", text)
        answer = door.post(path, made.encode())
        assert answer.status_code in ((400,) if refused else (200, 400)), answer.text
        assert ("levels of lists and objects" in answer.text) is refused, answer.text


def test_brackets_in_texts_are_no_levels(door: Running) -> None:
    text = '[{"\\' * 300 + "\\\\" * 9 + '"[' * 3
    answer = door.post(CHAT, {"messages": HI, "user": text, "metadata": {text: [text]}, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def levels_of(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(map(levels_of, inner), default=0) if isinstance(inner, list) else 0


_TEXTS = st.text(alphabet='[]{}"\\n,: a', max_size=8)
_VALUES = st.recursive(
    st.none() | _TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4)
)


@given(_VALUES, st.integers(MAX_LEVELS - 6, MAX_LEVELS))
def test_levels_are_those_of_the_decoded_value(value: Any, around: int) -> None:
    for _ in range(around):
        value = [value]
    raw = json.dumps(["]" * 9, value]).encode()
    if levels_of(json.loads(raw)) > MAX_LEVELS:
        with pytest.raises(BadParam, match="levels"):
            check_levels(raw)
    else:
        check_levels(raw)
