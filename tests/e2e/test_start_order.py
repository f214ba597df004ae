"""Instances find their registry before they load anything, and wait for one that is not there yet."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
from served import Served, refused

from ports import HeldPort

SMALL = ("--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1", "--served-model-name", "tiny")
WAITING = re.compile("waiting for the registry")


@pytest.mark.slow
def test_decode_waits_for_a_prefill_that_starts_later(tiny: Path) -> None:
    held = HeldPort()
    port = held.port
    url = f"http://127.0.0.1:{port}"
    words = ("--model", str(tiny), *SMALL)
    with Served("--registry", url, *words, command="decode", wait=False) as decode:
        line, *_ = decode.logged(WAITING)
        assert url in line
        with Served("--bootstrap-port", str(port), *words, command="prefill", wait=False) as prefill:
            decode.ready()
            prefill.ready()
            # The registry is there before prefill's model is: both load at the same time.
            log = prefill.log()
            assert log.index("event=registry_runs") < log.index("event=config")
            front = ("--registry", url, "--model", str(tiny), "--port", "0")
            with Served(*front, command="frontend", start_s=60) as frontend:
                body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
                answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                for part in (frontend, decode, prefill):
                    assert part.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_waits_ends_it_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    held = HeldPort()
    port = held.port
    words = ["--registry", f"http://127.0.0.1:{port}", "--model", str(tmp_path / "none")]
    command = [sys.executable, "-m", "segue.cli.main", "decode", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert WAITING.search(child.stderr.readline())
        child.send_signal(number)
        out, rest = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "")
    assert "Traceback" not in rest


@pytest.mark.slow
def test_a_registry_that_never_comes_is_told_before_a_model_that_is_not_there(tmp_path: Path) -> None:
    """The wrong model would end it with status 2: whoever looked first never saw it."""
    held = HeldPort()
    port = held.port
    words = ["--registry", f"http://127.0.0.1:{port}", "--model", str(tmp_path / "none")]
    last = refused("decode", *words, "--registry-wait-s", "0.1", status=1).splitlines()[-1]
    assert f"127.0.0.1:{port} cannot be reached" in last
    assert "--registry-wait-s" in last
