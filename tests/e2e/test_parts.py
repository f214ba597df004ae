"""The parts started by hand, and what a user hears who starts them wrongly."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served import Served, command, refused

from otlp import collecting
from ports import HeldPort

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SMALL = ("--dtype", "float32", "--kv-gib", "0.1", "--threads-per-worker", "1")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The traces that a collector gets from all processes."""
    with collecting() as (url, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield got


@pytest.fixture
def notified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """What a service manager hears of all processes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


@pytest.mark.slow
def test_prefill_decode_and_frontend_by_hand(
    tiny: Path, tmp_path: Path, traced: Any, notified: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o600)
    held = HeldPort()
    port = held.port
    url, trust = f"http://127.0.0.1:{port}", ("--secret-file", str(secret))
    model = ("--model", str(tiny), "--served-model-name", "tiny", *SMALL)
    with (
        Served("--bootstrap-port", str(port), *model, *trust, command="prefill", wait=False) as prefill,
        Served("--registry", url, *model, *trust, command="decode", wait=False) as decode,
        Served(
            "--registry", url, "--served-model-name", "tiny", "--port", "0", *trust, command="frontend"
        ) as frontend,
    ):
        prefill.ready()
        decode.ready()
        body = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        headers = {"x-request-id": "first", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60, headers=headers)
        assert answer.status_code == 200, answer.text
        told = command("explain", "first", "--registry", url, *trust)
        assert told.returncode == 0, told.stderr
        for word in ("frontend http: first", "prefill ", "decode ", "transfer", "handed_bytes"):
            assert word in told.stdout
        seen = command("ps", "--registry", url, *trust)
        assert seen.returncode == 0, seen.stderr
        lines = seen.stdout.splitlines()
        assert [line.split()[2:4] for line in lines[1:3]] == [["decode", "serving"], ["prefill", "serving"]]
        monkeypatch.setenv("XDG_RUNTIME_DIR", decode.runtime["XDG_RUNTIME_DIR"])  # as in its pod
        name = lines[1].split()[0]
        for words, state in (
            (("drain", "--self"), "drained"),
            (("resume", name, "--registry", url, *trust), "serving"),
        ):
            steered = command(*words, "--timeout", "30")
            assert steered.returncode == 0, steered.stderr
            assert f" {state}: running 0" in steered.stdout
        switched = command("switch", name, "unified", "--registry", url, *trust)
        assert switched.returncode == 0, switched.stderr
        assert " serving, before it decode" in switched.stdout
        decode.logged(re.compile(r"INFO +unified segue\.instance serving role=unified"))
        # The frontend hears of it a moment later, and waits for somebody who decodes.
        assert httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60).status_code == 200
        seen = command("ps", "--registry", url, *trust)
        assert {line.split()[2] for line in seen.stdout.splitlines()[1:3]} == {"prefill", "unified"}
        name = switched.stdout.splitlines()[-1].split()[1]
        stranger = tmp_path / "other"
        stranger.write_text("x" * 64)
        other = ("--registry", url, "--secret-file", str(stranger))
        assert "secret" in refused("decode", *other, *model, status=1)
        assert "secret" in refused("drain", name, *other, status=1)
        assert httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60).status_code == 200
        for part in (frontend, decode, prefill):
            assert part.stop() == 0
    told = [notified.recv(1024).splitlines()[0] for _ in range(7)]
    assert told == [b"READY=1"] * 4 + [b"STOPPING=1"] * 3  # decode twice: it was switched
    names = set()
    while not traced.empty():
        for resource in traced.get().resource_spans:
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            names |= {span.name for span in spans if span.trace_id.hex() == TRACE}
    ours = {"segue.frontend", "segue.prefill", "segue.decode", "transfer"}
    assert {"POST /v1/completions", "text_completion tiny", *ours} <= names


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("serve", "--model", "/no/such/folder"), "/no/such/folder"),
        (("serve", "--prefill", "none"), "--prefill"),
        (("serve", "--transport", "pigeon"), "pigeon"),
        (("decode", "--model", "smollm2"), "--registry"),
        (("prefill", "--model", "smollm2", "--host", "0.0.0.0"), "--advertise-host"),
        (("decode", "--model", "smollm2", "--registry", "http://127.0.0.1:1", "--cp", "2"), "--cp"),
        (("frontend",), "registry"),
    ],
)
def test_a_wrong_setting_is_one_sentence(arguments: tuple[str, ...], text: str) -> None:
    assert text in refused(*arguments)


def test_a_broken_gguf_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(4096))
    assert "broken.gguf" in refused("serve", "--model", str(broken), "--cache", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments in (
            ("serve", "--port", port),
            ("prefill", "--model", "smollm2", "--bootstrap-port", port),
        ):
            assert port in refused(*arguments, *SMALL)


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once() -> None:
    with Served(*SMALL, "--port", "0") as made:
        body = {"model": "smollm2", "prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{made.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()  # kept: to drop it would end the stream, and nothing be left to drain
            next(lines)
            # Not at rest: the second signal has to find a stream that the first one is waiting for.
            assert made.stop(signals=2, within_s=25, at_rest=False) == 1  # 30 s are what a drain takes
            assert "event=killed child=frontend" in made.log()
            with pytest.raises(httpx.TransportError):
                list(lines)
