"""Branches that the settings of several commands share: the model, limits, answers, keys, TLS and logs."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Final

from segue.engine.pool_size import Host
from segue.kv import ConfigError, Limits
from segue.server.settings.layers import integer, number, secret, text
from segue.server.settings.ranks_config import BALANCE_METHODS, LOCAL_HELP

REVISION_HELP = "branch, tag or commit of a model of the Hub (default: main)"
DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_HELP = "type of weights and KV; auto is bfloat16 where the processor multiplies it, float32 elsewhere"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
#: The clients whose `priority` and `user` count where prompts wait: those that have shown an API key, all, or
#: none.
CLIENT_ORDERS: Final = ("keys", "all", "none")
_DEFAULTS: Final = Limits()


#: Times that one request is placed in all, the first included, when workers fail.
MAX_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and how it is held in memory."""

    dtype: str = text(DTYPE_HELP, "auto", choices=DTYPES, metavar="TYPE")
    served_model_name: str | None = text(
        "model name for clients (default: the given name, or the last part of a path)", metavar="NAME"
    )
    page_tokens: int = integer("tokens in one page of KV", 16, low=1, high=1024)
    chunk_tokens: int = integer("most prompt tokens in one prefill step", 512, low=1, high=2**20)
    max_local_prefill_length: int = integer(LOCAL_HELP, 0, low=-1)
    send_layers: int = integer(
        "prefill: layers of a step that are sent while it computes the next ones; 0 sends all together",
        0,
        high=1024,
    )
    kv_gib: float | None = number(
        "memory for the KV pool of one instance, in GiB (default: a bounded share of the free memory)",
        low=2**-20,  # the model's own minimum is checked by `kv_pool_bytes`
        high=2**20,
        metavar="G",
    )
    threads_per_worker: int | None = integer(
        "threads of one worker (default: cores / workers)", low=1, high=4096
    )
    revision: str | None = text(REVISION_HELP, metavar="REV")
    cache: str | None = text(
        "folder for fetched and converted models and for compiled kernels", metavar="DIR"
    )

    def __post_init__(self) -> None:
        if self.chunk_tokens % self.page_tokens:
            raise ConfigError(
                f"--chunk-tokens {self.chunk_tokens} must be a multiple of --page-tokens "
                f"{self.page_tokens}: a chunk is sent in whole pages"
            )

    def threads(self, host: Host, workers: int) -> int:
        """Threads of each of `workers` workers that share `host`; at least one."""
        return self.threads_per_worker or max(1, host.cores // max(1, workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds and deadlines; `kv.limits` is the form in which the process uses them."""

    request_budget_s: float = number(
        "time a request may take in all", _DEFAULTS.request_budget_s, low=0.1, metavar="S"
    )
    drain_s: float = number(
        "time that requests in flight get at shutdown", _DEFAULTS.drain_s, low=0.1, metavar="S"
    )
    max_queue: int = integer("requests that may wait in one instance", _DEFAULTS.max_queue, low=1)
    max_batch: int = integer("sequences in one decode step", _DEFAULTS.max_batch, low=1, high=65536)
    max_body_bytes: int = integer("largest HTTP body", _DEFAULTS.max_body_bytes, low=1024)
    keepalive_s: float = number(
        "ping a peer after so long without sending", _DEFAULTS.keepalive_s, low=0.05, metavar="S"
    )
    peer_silence_s: float = number(
        "silence after which a peer counts as lost", _DEFAULTS.peer_silence_s, low=0.1, metavar="S"
    )

    def __post_init__(self) -> None:
        if self.keepalive_s * 2 > self.peer_silence_s:
            raise ConfigError(
                f"--peer-silence-s {self.peer_silence_s:g} must be at least twice --keepalive-s "
                f"{self.keepalive_s:g}, or a healthy peer is lost with its first late sign"
            )

    def limits(self) -> Limits:
        """These bounds with those that are not settings."""
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Log-probabilities of a prompt travel with its KV. Both halves of a request are posted at once.
        return Limits(max_metadata_bytes=32 * 2**20, early_wait_s=10.0, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersConfig:
    """How the frontend places and answers a request."""

    policy: str = text("how requests are placed", "total_requests", choices=BALANCE_METHODS, metavar="METHOD")
    max_attempts: int = integer(
        "times that one request is placed in all when workers fail; 1 never tries again",
        MAX_ATTEMPTS,
        low=1,
        high=64,
    )
    sampling_defaults: str = text(
        "source of sampling settings that a client leaves out: the model's generation_config.json, or "
        "OpenAI's defaults",
        "model",
        choices=("model", "openai"),
        metavar="WHOSE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Mutual TLS between the parts of a deployment: sessions, the registry and the tcp transport.
    All three files or none; every part of a deployment has them or none has."""

    tls_cert: str | None = text(
        "certificate that this process shows its peers (PEM, with its chain)", metavar="F"
    )
    tls_key: str | None = text("private key of --tls-cert (PEM, not encrypted)", metavar="F")
    tls_ca: str | None = text("authority that every peer's certificate must come from (PEM)", metavar="F")

    def __post_init__(self) -> None:
        given = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        missing = [flag for flag, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            raise ConfigError(
                f"TLS needs --tls-cert, --tls-key and --tls-ca together; {' and '.join(missing)} missing"
            )

    @property
    def enabled(self) -> bool:
        """TLS is asked for."""
        return self.tls_cert is not None

    @property
    def scheme(self) -> str:
        """The scheme of the registry's address."""
        return "https" if self.enabled else "http"


_HOST: Final = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+")


def _listed(text: str) -> frozenset[str]:
    return frozenset(filter(None, (one.strip() for one in text.split(","))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsConfig:
    """The public port: TLS, pages of other origins, streams that are quiet."""

    https_cert: str | None = text(
        "certificate that clients are shown (PEM, with its chain); a new file is taken without a restart",
        metavar="F",
    )
    https_key: str | None = text("private key of --https-cert (PEM, not encrypted)", metavar="F")
    allowed_origins: str = text(
        "origins whose pages may ask from a browser (https://HOST[:PORT], with commas), or *",
        "",
        metavar="LIST",
    )
    stream_comment_s: float = number(
        "time without a token after which a stream gets a comment, so that proxies keep it open; 0 never",
        15.0,
        metavar="S",
    )
    shutdown_delay_s: float = number(
        "after SIGTERM serve on for so long with /ready at 503, so that balancers leave first; then drain",
        0.0,
        high=3600.0,
        metavar="S",
    )

    def __post_init__(self) -> None:
        if (self.https_cert is None) is not (self.https_key is None):
            raise ConfigError("TLS for clients needs --https-cert and --https-key together")
        for origin in self.origins - {"*"}:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins: {origin!r} is no origin; give https://HOST[:PORT] without a path, "
                    "or *"
                )

    @property
    def origins(self) -> frozenset[str]:
        """The allowed origins."""
        return _listed(self.allowed_origins)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access to the frontend, or to an instance's HTTP port. Without a key: everybody who can reach it."""

    api_key: str | None = secret(
        "key that clients must show; other users of this host see a command line, so rather give the "
        "variable or --api-key-file",
        metavar="K",
    )
    api_key_file: str | None = text(
        "file with keys, one a line (# begins a comment), one of which clients must show", metavar="F"
    )
    operator_key_file: str | None = text(
        "file with further keys, one a line, that see everybody's requests at /dashboard (default: with "
        "several keys each sees its own)",
        metavar="F",
    )
    allowed_hosts: str = text(
        "names by which clients without a key reach this server, with commas: NAME, *.NAME for all below it, "
        "or *; addresses, localhost and the host's own name are taken always",
        "",
        metavar="LIST",
    )
    client_order: str = text(
        "`priority` and `user` of a request order the queue: for clients with an API key, for all, or none",
        "keys",
        choices=CLIENT_ORDERS,
        metavar="WHOSE",
    )
    prefix_cache_sharing: str = text(
        "requests that share cached prefixes: tenant (requests with the same API key, if there are several "
        "keys) or all (cached_tokens and the time to the first token then reveal the prompts of others)",
        "tenant",
        choices=("tenant", "all"),
    )

    def __post_init__(self) -> None:
        if self.operator_key_file is not None and self.api_key is None and self.api_key_file is None:
            raise ConfigError(
                "--operator-key-file needs --api-key-file: without keys everybody sees all requests"
            )
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"--allowed-hosts: {host!r} is no name of a host; give NAME without a port, *.NAME, or *"
                )

    @property
    def hosts(self) -> frozenset[str]:
        """The allowed names."""
        return _listed(self.allowed_hosts.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The log on standard error."""

    log_level: str = text("least severe events to log", "info", choices=LOG_LEVELS, metavar="L")
    log_format: str = text("form of each line: text, or one JSON object", "text", choices=LOG_FORMATS)
