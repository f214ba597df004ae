"""API keys of the public server: who has none of them gets nothing but `/health` and `/ready`."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from segue.kv import ConfigError, ErrorCode
from segue.server.frontend.dialects import dialect_of
from segue.server.frontend.http_call import CACHE_DOMAIN, TENANT, Receive, Scope, Send, request_id_of
from segue.server.frontend.problems import BadKey
from segue.server.observe.metrics import Metrics
from segue.server.settings.shared_config import AccessConfig

log = logging.getLogger("segue.frontend.keys")

#: Paths for probes, which have no key.
OPEN_PATHS = frozenset({"/health", "/ready"})
#: Pages for a browser, which asks its user for the key as a password.
BROWSER_PATH = "/dashboard"
MAX_KEY_CHARS = 4096
#: Characters that a header can carry as one word.
_LEGAL = re.compile(r"[\x21-\x7e]+")
_MAX_FILE_BYTES = 2**20


def read_keys(access: AccessConfig) -> tuple[str, ...]:
    """The keys of `--api-key` and of `--api-key-file` (one a line; empty lines and those that begin with #
    are none). Raises ConfigError, which never shows a key."""
    keys = [] if access.api_key is None else [_checked(access.api_key, "--api-key")]
    if access.api_key_file is not None:
        name = access.api_key_file
        try:
            with Path(name).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(_MAX_FILE_BYTES + 1)
        except OSError as exc:
            raise ConfigError(f"--api-key-file {name} cannot be read: {exc.strerror}") from exc
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file {name} has more than {_MAX_FILE_BYTES} bytes")
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            log.warning("every user of this host can read or change --api-key-file %s: chmod 600 it", name)
        lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
        found = [
            _checked(line, f"line {number} of --api-key-file {name}")
            for number, line in enumerate(lines, 1)
            if line and not line.startswith("#")
        ]
        if not found:
            raise ConfigError(f"--api-key-file {name} holds no key: one a line, # begins a comment")
        keys += found
    return tuple(dict.fromkeys(keys))


def _checked(key: str, where: str) -> str:
    if len(key) > MAX_KEY_CHARS or not _LEGAL.fullmatch(key):
        raise ConfigError(
            f"{where} is no key: 1 to {MAX_KEY_CHARS} letters, digits and signs of ASCII, without blanks"
        )
    return key


class ApiKeys:
    """A set of keys, of which only digests are kept."""

    def __init__(self, keys: Iterable[str], prefix_cache_sharing: str = "tenant") -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._share_prefixes = prefix_cache_sharing == "all"

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header shows one of the keys. Takes as long for each."""
        scheme, _, token = authorization.partition(b" ")
        shown, right = _digest(token.strip()), False
        for digest in self._digests:
            right |= hmac.compare_digest(shown, digest)
        return right and scheme.lower() == b"bearer"

    def tenant(self, authorization: bytes) -> str:
        """The number of the client's key; empty if there is only one key. Call it after `allow` has
        succeeded."""
        shown = _digest(authorization.partition(b" ")[2].strip())
        return f"key {self._digests.index(shown) + 1}" if len(self._digests) > 1 else ""

    def cache_domain(self, authorization: bytes) -> str:
        """The domain of cached prefixes that the key may use; empty: the common one. It is derived from the
        key itself, because the order of the keys may change while instances keep their caches. Call it after
        `allow` has succeeded."""
        if self._share_prefixes or len(self._digests) < 2:
            return ""
        return _digest(authorization.partition(b" ")[2].strip()).hex()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyCheck:
    """An ASGI application in front of `app` that answers 401 to who shows none of `keys`."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], keys: ApiKeys, metrics: Metrics
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        authorization = _authorization(scope)
        allowed = self._keys.allow(authorization)
        if allowed:
            scope[TENANT] = self._keys.tenant(authorization)
            scope[CACHE_DOMAIN] = self._keys.cache_domain(authorization)
        if allowed or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        self._metrics.finished("any", ErrorCode.UNAUTHORIZED)
        browser = scope["path"].startswith(BROWSER_PATH)
        error = BadKey(
            "an API key of this server is needed: as the password, with any name"
            if browser
            else "an API key of this server is needed: Authorization: Bearer KEY"
        )
        raw = msgspec.json.encode(dialect_of(scope["path"]).body(error, request_id_of(scope)))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
            (b"www-authenticate", b'Basic realm="segue", charset="UTF-8"' if browser else b"Bearer"),
            (b"x-request-id", request_id_of(scope).encode()),
        ]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})


def _authorization(scope: Scope) -> bytes:
    """The request's only Authorization header; empty where there is none, or more than one. Anthropic's
    clients send the key in `x-api-key` instead, a browser as a password."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    if not found:
        found = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(found) != 1:
        return b""
    scheme, _, token = bytes(found[0]).partition(b" ")
    if scheme.lower() == b"basic" and scope["path"].startswith(BROWSER_PATH):
        try:
            return b"Bearer " + b64decode(token, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return bytes(found[0])
