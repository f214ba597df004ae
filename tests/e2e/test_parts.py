"""The parts started by hand, and what a user hears who starts them wrongly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cluster import free_ports
from served import Served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SMALL = ("--dtype", "float32", "--kv-gib", "0.1", "--threads-per-worker", "1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "segue.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_prefill_decode_and_frontend_by_hand(tiny: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o600)
    [port] = free_ports(1)
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
        answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        stranger = tmp_path / "other"
        stranger.write_text("x" * 64)
        refused = run("decode", "--registry", url, *model, "--secret-file", str(stranger))
        assert refused.returncode in (1, 2)
        assert "secret" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60).status_code == 200
        for part in (frontend, decode, prefill):
            assert part.stop() == 0


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
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_broken_gguf_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(4096))
    done = run("serve", "--model", str(broken), "--cache", str(tmp_path / "cache"))
    assert done.returncode == 2
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments in (
            ("serve", "--port", port),
            ("prefill", "--model", "smollm2", "--bootstrap-port", port),
        ):
            done = run(*arguments, *SMALL)
            assert done.returncode == 2, done.stderr
            assert port in done.stderr
            assert "Traceback" not in done.stderr


def test_a_second_signal_ends_everything_at_once() -> None:
    with Served(*SMALL, "--port", "0") as made:
        body = {"model": "smollm2", "prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{made.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()  # kept: to drop it would end the stream, and nothing be left to drain
            next(lines)
            # Not at rest: the second signal has to find a stream that the first one is waiting for.
            assert made.stop(signals=2, within_s=10, at_rest=False) == 1
            assert "event=killed child=frontend" in made.log()
            with pytest.raises(httpx.TransportError):
                list(lines)
