"""A Hugging Face Hub of our own on loopback: the part of its HTTP API that downloads use.

`GET /api/models/{id}[/revision/{rev}]` and `/tree/{rev}`; `HEAD` and `GET /{id}/resolve/{rev}/{file}` with
ETag, commit and Range. Errors carry the headers by which `huggingface_hub` tells them apart.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """The files of a repository at each commit, and the commit of each branch or tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    #: the token that may read it; the Hub hides a private one, and shows the list of files of a gated one
    token: str = ""
    gated: bool = False

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """A new commit with `files`, which `names` (branches, tags) are at from now on."""
        content = repr(sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items()))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs |= dict.fromkeys(names, sha)
        return sha


class Hub:
    """The server's state; tests change it while it runs."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        #: every request: method, path, Range, Authorization
        self.seen: list[tuple[str, str, str, str]] = []
        #: files of which one answer stops after so many bytes: the connection then ends, or is held
        self.cut: dict[str, int] = {}
        self.hold = False
        self.held = threading.Event()
        self.released = threading.Event()
        #: answer everything with this status
        self.broken = 0
        #: send other bytes than the ones the ETag is of
        self.spoil: set[str] = set()
        self.url = ""

    def add(self, name: str, folder: Path, **more: Any) -> str:
        """A repository with the files of `folder`, at `main`; its commit."""
        repository = self.repositories[name] = Repository(**more)
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return repository.commit(files, "main")

    def got(self, method: str, part: str) -> list[tuple[str, str, str, str]]:
        """The requests of `method` whose path holds `part`."""
        return [request for request in self.seen if request[0] == method and part in request[1]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _send(self, status: int, data: bytes = b"", *, body: bool = True, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _refuse(self, status: int, code: str, text: str, body: bool) -> None:
        self._send(
            status, json.dumps({"error": text}).encode(), body=body, X_Error_Code=code, X_Error_Message=text
        )

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization", "")
        hub.seen.append((self.command, path, self.headers.get("Range", ""), authorization))
        if hub.broken:
            self._send(hub.broken, b"", body=body)
            return
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path)
        listing = tree or re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = listing or file
        repository = hub.repositories.get(found[1]) if found else None
        if found is None or repository is None:
            # As the Hub does: to somebody without a token it does not say what is private.
            status = 404 if authorization else 401
            self._refuse(status, "RepoNotFound", "Repository not found", body)
            return
        readable = not repository.token or authorization == f"Bearer {repository.token}"
        if not readable and not (repository.gated and listing):
            if repository.gated:
                self._refuse(
                    403 if authorization else 401, "GatedRepo", "Access to model is restricted", body
                )
            else:
                self._refuse(404 if authorization else 401, "RepoNotFound", "Repository not found", body)
            return
        revision = found[2] or "main"
        commit = repository.refs.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}", body)
        elif tree:
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(rows).encode(), body=body)
        elif listing:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._send(
                200, json.dumps({"id": found[1], "sha": commit, "siblings": siblings}).encode(), body=body
            )
        elif found[3] not in files:
            self.send_response(404)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._file(found[3], files[found[3]], commit, body)

    def _file(self, name: str, data: bytes, commit: str, body: bool) -> None:
        large = name.endswith((".safetensors", ".bin"))
        etag = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(data).hexdigest()
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and body:
            start, status = int(asked[1]), 206
        self.send_response(status)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if name in self.hub.spoil:
            data = bytes(len(data))
        stop = self.hub.cut.pop(name, None)
        if stop is None:
            self.wfile.write(data[start:])
            return
        self.wfile.write(data[start : start + stop])
        self.wfile.flush()
        if self.hub.hold:
            self.hub.held.set()
            self.hub.released.wait(60)
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextmanager
def serve(port: int = 0) -> Iterator[Hub]:
    """A hub that runs while this is entered."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", port), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
