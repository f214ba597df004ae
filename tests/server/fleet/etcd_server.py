"""A real etcd server for tests (Debian's `etcd-server`)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from ports import HeldPort
from tls_files import TlsFiles

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="no etcd here: apt-get install etcd-server")


class EtcdServer:
    """One member at a free port of loopback, with its data in `folder`; with `tls` it wants certificates of
    its clients. Begins stopped."""

    def __init__(self, folder: Path, seconds: float = 60.0, tls: TlsFiles | None = None) -> None:
        self.folder = folder
        self._tls = tls
        self._verify = tls.load().client if tls is not None else False
        self._seconds = seconds
        self._held = HeldPort(), HeldPort()
        self.port, self._peer_port = (held.port for held in self._held)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    @property
    def _here(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and return once it answers."""
        assert ETCD is not None
        here, peer = self._here, f"http://127.0.0.1:{self._peer_port}"
        trust: list[str] = []
        if (tls := self._tls) is not None:
            trust = ["--cert-file", str(tls.cert), "--key-file", str(tls.key)]
            trust += ["--client-cert-auth", "--trusted-ca-file", str(tls.ca)]
        self._process = subprocess.Popen(
            [
                *(ETCD, "--data-dir", str(self.folder / "data"), "--log-level", "error"),
                *("--listen-client-urls", here, "--advertise-client-urls", here),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}", "--unsafe-no-fsync", *trust),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._answering()

    def _answering(self) -> None:
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            assert self._process is not None
            assert self._process.poll() is None, "etcd ended at its start"
            try:
                answer = httpx.get(f"{self._here}/health", timeout=5, verify=self._verify)
                if answer.json()["health"] == "true":
                    return
            except (httpx.HTTPError, ValueError):
                time.sleep(0.05)  # of a program of others nothing else says that it is ready
        raise AssertionError("etcd does not answer")

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.send_signal(signal.SIGCONT)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It answers nobody, and its connections stay."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def forget(self) -> None:
        """Its data is lost; it must not run."""
        shutil.rmtree(self.folder / "data")

    def ask(self, method: str, token: object = None, **body: object) -> dict[str, object]:
        """A call of the JSON gateway, as the user of `token`."""
        headers = {"Authorization": str(token)} if token else {}
        url = f"{self._here}/v3/{method}"
        answer = httpx.post(url, json=body, timeout=10, verify=self._verify, headers=headers)
        answer.raise_for_status()
        found: dict[str, object] = answer.json()
        return found
