"""The description of the endpoints: complete, and true to the types."""

import re
from typing import Any

from frontend_rig import Running
from starlette.routing import Route

from segue.server.frontend.app import OPERATIONS
from segue.server.frontend.dashboard import Dashboard
from segue.server.frontend.request_fields import ChatBody


def test_every_endpoint_is_described(door: Running) -> None:
    dashboard = Dashboard(None, door.door.metrics, model="tiny", open_operator=None)  # type: ignore[arg-type]
    found = {route.path for route in dashboard.routes() if isinstance(route, Route)}
    assert {o.path for o in OPERATIONS if isinstance(o.handler, str)} == found
    assert all(o.summary for o in OPERATIONS)


def test_the_document_has_the_fields_of_each_body(door: Running) -> None:
    found: Any = door.http.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    post = found["paths"]["/v1/chat/completions"]["post"]
    reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = found["components"]["schemas"][reference.rsplit("/", 1)[1]]
    assert set(schema["properties"]) == set(ChatBody.__struct_fields__)
    assert schema["required"] == ["messages"]
    assert "bad_words" in schema["x-refused"]
    text = door.http.get("/openapi.json").text
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in found["components"]["schemas"]


def test_the_page_needs_no_other_address(door: Running) -> None:
    text = door.http.get("/docs").text
    for operation in OPERATIONS:
        assert operation.shown_path in text
    assert "chat_template_kwargs" in text
    assert not re.search(r"https?://|<script|<link", text)


def test_the_tokenizer_and_the_load(door: Running) -> None:
    found = door.http.get("/tokenizer_info").json()
    assert (found["eos_token"], found["bos_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert "im_start" in found["chat_template"]
    assert found["max_model_len"] == 512
    assert "/tmp" not in str(found)
    assert door.http.get("/load").json() == {"server_load": 0}
