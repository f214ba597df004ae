"""API keys of the public server: who has none of them gets nothing but `/`, `/health` and `/ready`."""

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

from segue.kv import ConfigError, ErrorCode
from segue.server.frontend.http_call import EXTRA_HEADERS, KEY_OWNER, HttpCall, KeyOwner, Receive, Scope, Send
from segue.server.frontend.problems import BadKey
from segue.server.observe.metrics import Metrics
from segue.server.settings.shared_config import AccessConfig

log = logging.getLogger("segue.frontend.keys")

#: Paths for probes, which have no key.
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
#: Pages for a browser, which asks its user for the key as a password.
BROWSER_PATH = "/dashboard"
MAX_KEY_CHARS = 4096
#: Characters that a header can carry as one word.
_LEGAL = re.compile(r"[\x21-\x7e]+")
_MAX_FILE_BYTES = 2**20


def read_keys(access: AccessConfig) -> tuple[str, ...]:
    """The keys of `--api-key`, of `--api-key-file` (one a line; empty lines and those that begin with # are
    none) and of `--operator-key-file`. Raises ConfigError, which never shows a key."""
    keys = [] if access.api_key is None else [_checked(access.api_key, "--api-key")]
    keys += _keys_in(access.api_key_file, "--api-key-file")
    return tuple(dict.fromkeys(keys + _keys_in(access.operator_key_file, "--operator-key-file")))


def _keys_in(name: str | None, flag: str) -> list[str]:
    if name is None:
        return []
    try:
        with Path(name).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{flag} {name} cannot be read: {exc.strerror}") from exc
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f"{flag} {name} has more than {_MAX_FILE_BYTES} bytes")
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        log.warning("every user of this host can read or change %s %s: chmod 600 it", flag, name)
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    found = [
        _checked(line, f"line {number} of {flag} {name}")
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    ]
    if not found:
        raise ConfigError(f"{flag} {name} holds no key: one a line, # begins a comment")
    return found


def _checked(key: str, where: str) -> str:
    if len(key) > MAX_KEY_CHARS or not _LEGAL.fullmatch(key):
        raise ConfigError(
            f"{where} is no key: 1 to {MAX_KEY_CHARS} letters, digits and signs of ASCII, without blanks"
        )
    return key


class ApiKeys:
    """A set of keys, of which only digests are kept. `operators` are those of them that see everybody's
    requests."""

    def __init__(
        self, keys: Iterable[str], prefix_cache_sharing: str = "tenant", operators: Iterable[str] = ()
    ) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._operators = {_digest(key.encode()) for key in operators}
        self._share_prefixes = prefix_cache_sharing == "all"

    @classmethod
    def of(cls, access: AccessConfig) -> ApiKeys:
        """The keys of the settings. Raises ConfigError."""
        operators = _keys_in(access.operator_key_file, "--operator-key-file")
        return cls(read_keys(access), access.prefix_cache_sharing, operators)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, authorization: bytes) -> KeyOwner | None:
        """The rights of the key that an Authorization header shows; None if it shows none of the keys. Takes
        as long for each."""
        scheme, _, token = authorization.partition(b" ")
        shown = _digest(token.strip())
        right = [hmac.compare_digest(shown, digest) for digest in self._digests]
        if not any(right) or scheme.lower() != b"bearer":
            return None
        if len(right) == 1:
            return KeyOwner()
        tenant = f"key {right.index(True) + 1}"
        # The domain is the key's own: the order of the keys may change while instances keep their caches.
        domain = "" if self._share_prefixes else shown.hex()
        return KeyOwner(tenant, "" if shown in self._operators else tenant, domain)


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
        owner = self._keys.owner(_authorization(scope))
        if owner is not None:
            scope[KEY_OWNER] = owner
        if owner is not None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        self._metrics.finished("any", ErrorCode.UNAUTHORIZED)
        browser = scope["path"].startswith(BROWSER_PATH)
        error = BadKey(
            "an API key of this server is needed: as the password, with any name"
            if browser
            else "an API key of this server is needed: Authorization: Bearer KEY"
        )
        challenge = b'Basic realm="segue", charset="UTF-8"' if browser else b"Bearer"
        scope[EXTRA_HEADERS] = (*scope.get(EXTRA_HEADERS, ()), (b"www-authenticate", challenge))
        await HttpCall(scope, receive).fail(error)


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
