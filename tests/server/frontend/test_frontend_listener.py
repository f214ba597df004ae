"""The port while the frontend starts: it answers at once, honestly, and a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from segue.kv.errors import ConfigError
from segue.server.frontend.frontend_listener import FrontendListener
from segue.server.frontend.http_call import HttpCall, Receive, Scope, Send
from segue.server.frontend.keys import ApiKeys
from segue.server.observe.metrics import Metrics


def listener_at(port: int = 0, *keys: str) -> FrontendListener:
    return FrontendListener("127.0.0.1", port, drain_s=5.0, keys=ApiKeys(keys), metrics=Metrics())


def test_api_keys_are_asked_for_from_the_first_moment_on() -> None:
    async def main() -> None:
        door = listener_at(0, "hunter2")
        async with httpx.AsyncClient(base_url=door.url) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/v1/models")).status_code == 401
            shown = await http.get("/v1/models", headers={"authorization": "Bearer hunter2"})
            assert shown.json()["error"]["code"] == "STARTING"
        await door.close()

    asyncio.run(main())


def test_what_a_client_is_told_until_there_is_an_application() -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await HttpCall(scope, receive).answer(200, {"here": scope["path"]})

    async def main() -> None:
        door = listener_at()
        async with httpx.AsyncClient(base_url=door.url) as http:
            assert (await http.get("/health")).json() == {"status": "ok"}
            for path in ("/", "/health"):  # a body would be the beginning of the next answer
                assert (await http.head(path)).status_code == 200
            door.reason = "the frontend is waiting for its model"
            ready = await http.get("/ready")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
            assert ready.json() == {"ready": False, "reason": f"segue is starting: {door.reason}"}
            for path in ("/v1/chat/completions", "/v1/models", "/metrics", "/nowhere"):
                early = await http.post(path, json={"messages": []}, headers={"x-request-id": "mine"})
                assert (early.status_code, early.headers["retry-after"]) == (503, "1")
                assert early.headers["x-request-id"] == "mine"
                error = early.json()["error"]
                assert (error["code"], error["message"]) == ("STARTING", f"segue is starting: {door.reason}")
            door.open(application)
            assert (await http.get("/ready")).json() == {"here": "/ready"}
        await door.close()
        await door.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(door.url.rpartition(":")[2])), timeout=5).close()

    asyncio.run(main())


def test_a_port_in_use_is_a_configuration_error() -> None:
    async def main(port: int) -> None:
        listener_at(port)

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        asyncio.run(main(taken.getsockname()[1]))


def test_what_listens_first_imports_no_tokenizer() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'segue.server.frontend.tokenizer'}"
    code = f"import sys, segue.cli.commands.frontend; print(*{heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "\n"


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A frontend in whose way to the tokenizer stands a module that never ends."""
    (tmp_path / "transformers.py").write_text("import threading\nthreading.Event().wait()\n")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "segue.cli.main",
            "frontend",
            "--registry",
            "http://127.0.0.1:1",
            "--port",
            "0",
        ],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_frontend_that_imports_answers_and_a_signal_ends_it(loading: subprocess.Popen[str]) -> None:
    assert loading.stderr is not None
    url = next(line for line in loading.stderr if "event=listening" in line).rpartition("url=")[2].strip()
    assert httpx.get(f"{url}/health").status_code == 200
    assert "waiting for an instance" in httpx.get(f"{url}/ready").json()["reason"]
    refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": []})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "STARTING")
    loading.send_signal(signal.SIGTERM)
    _, rest = loading.communicate(timeout=60)
    assert loading.returncode == 0, rest
    assert "event=stopped_while_loading" in rest
    assert "Traceback" not in rest
