"""The settings of each command, as frozen trees that are valid as a whole once they exist.

`ServeConfig`, `InstanceConfig` (its role is given by the command) and `FrontendConfig` share their
branches. Relations between settings are checked in each tree's `__post_init__`, and only there.
Built by `settings.build` from flags, then `SEGUE_*`, then a TOML file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from segue.engine.model_names import DEFAULT_MODEL, served_name
from segue.engine.parallel import ParallelSize
from segue.engine.pool_size import Host, ModelSize, check_memory, kv_pool_bytes
from segue.kv import ChecksumMode, ConfigError, Role
from segue.server.settings.kv_events_config import KVEventsConfig
from segue.server.settings.layers import integer, number, required, switch, text
from segue.server.settings.ranks_config import (
    BALANCE_METHODS,
    CP_HELP,
    EXPERTS_HELP,
    PP_HELP,
    TP_HELP,
    RanksConfig,
    check_expert_parallel,
)
from segue.server.settings.registry_address import REGISTRY_HELP, bracket, check_hosts, check_url
from segue.server.settings.shared_config import (
    REVISION_HELP,
    AccessConfig,
    AnswersConfig,
    ClientsConfig,
    LimitsConfig,
    LogConfig,
    ModelConfig,
    TlsConfig,
)

MODEL_HELP = "folder, GGUF file, smollm2, or a name of the Hugging Face Hub, ORG/NAME"
CHECKSUM_MODES = tuple(mode.value for mode in ChecksumMode)
TRANSPORT_HELP = (
    "transport of the KV: one of the list of `segue doctor`, or several separated by commas, of which each "
    "pair uses the fastest; auto is shm,tcp"
)
CHECKSUM_HELP = (
    "part of each KV chunk that is verified by a checksum after it has landed; prefill's setting decides"
)
DP_HELP = "data-parallel ranks of one instance: each is a process with an engine, a pool and ports of its own"

#: Each DP rank has its own of these ports.
_PORTS = ("port", "advertise_port", "data_port", "advertise_data_port", "http_port")


def _client_host() -> Any:
    return text("address that clients connect to", "127.0.0.1", metavar="H")


def _client_port() -> Any:
    return integer("port that clients connect to; 0 takes a free one", 8000, high=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """`segue serve`: a whole deployment on one host."""

    model: str = text(MODEL_HELP, DEFAULT_MODEL, metavar="PATH|NAME")
    host: str = _client_host()
    port: int = _client_port()
    prefill: int = integer("prefill instances", 1, low=1, high=64)
    decode: int = integer("decode instances", 1, low=1, high=64)
    unified: bool = switch("one instance that does both, without a hand-off")
    transport: str = text(TRANSPORT_HELP, "auto", metavar="NAMES")
    kv_checksum: str = text(CHECKSUM_HELP, "full", choices=CHECKSUM_MODES, metavar="MODE")
    instance_doors: bool = switch(
        "open an HTTP port for each instance (health, metrics, integrity), on loopback; free ports"
    )
    bootstrap_port: int = integer("loopback port of its registry; 0 takes a free one", 0, high=65535)
    restart: str = text(
        "restart children that fail, or none",
        "on-failure",
        choices=("on-failure", "never"),
        metavar="WHICH",
    )
    secret_file: str | None = text(
        "file with the secret that `segue ps` and the like must share (default: a random one)", metavar="F"
    )
    ranks: RanksConfig = field(default_factory=RanksConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    events: KVEventsConfig = field(default_factory=KVEventsConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    engine: ModelConfig = field(default_factory=ModelConfig)
    limit: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.unified and (self.prefill, self.decode, self.ranks) != (1, 1, RanksConfig()):
            raise ConfigError(
                "--unified runs one instance of one rank for both; drop --prefill, --decode and what gives "
                "either of them ranks (--prefill-tp and the like), or --unified"
            )
        self.events.check(self.leaders)

    def _counts(self) -> dict[Role, int]:
        """Leaders of each role."""
        if self.unified:
            return {Role.UNIFIED: 1}
        sides = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: count * self.ranks.dp(role) for role, count in sides.items()}

    @property
    def leaders(self) -> int:
        """Leaders of all instances, each with a pool."""
        return sum(self._counts().values())

    @property
    def workers(self) -> int:
        """Processes that compute."""
        return sum(count * self.ranks.size(role).ranks for role, count in self._counts().items())

    def derived(self, host: Host, size: ModelSize | None = None) -> dict[str, object]:
        """Values derived from the settings and the host; logged once at start."""
        return {
            "served_model": served_name(self.model, self.engine.served_model_name),
            "workers": self.workers,
            "threads_per_worker": self.engine.threads(host, self.workers),
            "kv_gib": round(self.kv_bytes(host, size) / 2**30, 3),
        }

    def check_memory(self, host: Host) -> None:
        """Raise ConfigError if `--kv-gib` of all instances together is more than `host` has free."""
        check_memory(self.engine.kv_gib, 1 if self.unified else self.prefill + self.decode, host)

    def kv_bytes(self, host: Host, size: ModelSize | None = None, dp: int = 1) -> int:
        """Bytes of each pool of an instance of `dp` ranks."""
        return kv_pool_bytes(self.engine.kv_gib, host, self.leaders, size, self.engine.page_tokens, dp)

    def instance(
        self, role: Role, name: str, host: Host, registry: str, size: ModelSize | None = None
    ) -> InstanceConfig:
        """The configuration of one of this deployment's instances, with the memory and threads of one of its
        DP ranks."""
        dp, ranks = self.ranks.dp(role), self.ranks.size(role)
        return InstanceConfig(
            dp=dp,
            load_balance=self.answers.policy,
            model=self.model,
            name=name,
            role=role,
            registry=registry,
            tp=ranks.tp,
            pp=ranks.pp,
            cp=ranks.cp,
            enable_expert_parallel=self.ranks.enable_expert_parallel and dp > 1,
            transport=self.transport,
            kv_checksum=self.kv_checksum,
            http_port=0 if self.instance_doors else None,
            door="probes",
            engine=dataclasses.replace(
                self.engine,
                served_model_name=served_name(self.model, self.engine.served_model_name),
                kv_gib=self.kv_bytes(host, size, dp) / 2**30,
                threads_per_worker=self.engine.threads(host, self.workers),
                revision=None,  # by now the model is a path
            ),
            tls=self.tls,
            limit=self.limit,
            log=self.log,
        )

    def frontend(self, registry: str) -> FrontendConfig:
        """The configuration of this deployment's frontend."""
        return FrontendConfig(
            registry=registry,
            host=self.host,
            port=self.port,
            model=self.model,
            served_model_name=served_name(self.model, self.engine.served_model_name),
            answers=self.answers,
            access=self.access,
            clients=self.clients,
            tls=self.tls,
            limit=self.limit,
            log=self.log,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """`segue prefill`, `segue decode`, `segue unified`: one instance. `secret` is the content of
    `secret_file`, put there by whoever reads files; it is never printed."""

    model: str = required(MODEL_HELP, metavar="PATH|NAME")
    role: Role = field(default=Role.PREFILL)
    name: str | None = text("name in logs and metrics (default: the role)", metavar="NAME")
    registry: str | None = text(REGISTRY_HELP, metavar="URL")
    registry_wait_s: float = number(
        "time to wait for the registry at the start, before the model is loaded", 300.0, metavar="S"
    )
    bootstrap_port: int = integer(
        "prefill: port of the registry that it runs if --registry is absent; foreign routers know the "
        "instance by it in both cases",
        8998,
        low=1,
        high=65535,
    )
    host: str = text("address that peers connect to", "127.0.0.1", metavar="H")
    advertise_host: str | None = text("address that peers are told (default: --host)", metavar="H")
    port: int = integer("port of the control channel; 0 takes a free one", 0, high=65535)
    advertise_port: int | None = integer(
        "control port that peers are told, behind a proxy or NAT (default: --port)", low=1, high=65535
    )
    data_port: int = integer("port of the tcp transport; 0 takes a free one", 0, high=65535)
    advertise_data_port: int | None = integer(
        "data port that peers are told, behind a proxy or NAT (default: --data-port)", low=1, high=65535
    )
    http_port: int | None = integer(
        "HTTP port for probes, scrapers and foreign routers; 0 takes a free one",
        high=65535,
    )
    door: str = text("what that door offers", "all", choices=("all", "probes"), metavar="WHAT", hidden=True)
    tp: int = integer(
        f"{TP_HELP}; --kv-gib is for all ranks together, --threads-per-worker for each", 1, low=1, high=64
    )
    pp: int = integer(PP_HELP, 1, low=1, high=64)
    cp: int = integer(f"prefill: {CP_HELP}", 1, low=1, high=64)
    dp: int = integer(
        f"{DP_HELP}; they share --kv-gib and the cores, and to each given port a rank adds its number",
        1,
        low=1,
        high=64,
    )
    dp_rank: int | None = integer("which of them this process is", low=0, high=63, hidden=True)
    incarnation: str | None = text("what all of them are, with --dp-rank", hidden=True)
    enable_expert_parallel: bool = switch(EXPERTS_HELP)
    dp_fds: str | None = text("sockets to the others, with --dp-rank: descriptors with commas", hidden=True)
    load_balance: str = text(
        "prefill: which DP rank of this instance gets a request that names none",
        "total_requests",
        choices=BALANCE_METHODS,
        metavar="METHOD",
    )
    dp_rank_conflict: str = text(
        "prefill: if a request is on another DP rank than decode infers, redirect decode to the right rank "
        "or fail on both sides",
        "redirect",
        choices=("redirect", "fail"),
        metavar="WHAT",
    )
    force_query_prefill_dp_rank: bool = switch(
        "decode asks the registry for the DP rank of prefill where it could infer it; give it to both sides"
    )
    secret_file: str | None = text("file with the deployment's shared secret", metavar="F")
    transport: str = text(TRANSPORT_HELP, "auto", metavar="NAMES")
    kv_checksum: str = text(CHECKSUM_HELP, "full", choices=CHECKSUM_MODES, metavar="MODE")
    access: AccessConfig = field(default_factory=AccessConfig)
    events: KVEventsConfig = field(default_factory=KVEventsConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    engine: ModelConfig = field(default_factory=ModelConfig)
    limit: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.registry is None and self.role is not Role.PREFILL:
            raise ConfigError(
                f"segue {self.role} needs --registry http://HOST:PORT, or SEGUE_REGISTRY; "
                "a prefill instance without one runs it on its --bootstrap-port"
            )
        if self.registry is not None:
            check_url(self.registry, encrypted=self.tls.enabled)
        check_hosts(self.host, self.advertise_host, self.secret_file is not None)
        if self.cp > 1 and self.role is not Role.PREFILL:
            raise ConfigError(f"--cp {self.cp} shares out prompts, which prefill computes; set it to 1 here")
        if self.role is Role.UNIFIED and self.size.ranks > 1:
            raise ConfigError(
                "segue unified runs one rank: set --tp and --pp to 1, or use prefill and decode"
            )
        for name in _PORTS:
            if (getattr(self, name) or 0) + self.dp * self.size.ranks > 2**16:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} leaves no ports for {self.dp} ranks"
                )
        self.events.check(self.dp)
        if self.enable_expert_parallel:
            measures = self.role is Role.DECODE and self.engine.max_local_prefill_length < 0
            check_expert_parallel(self.dp, self.size, measures=measures)
        if self.engine.send_layers and self.role is Role.PREFILL and self.size.ranks > 1:
            raise ConfigError(
                f"--send-layers {self.engine.send_layers} needs prefill to have one rank: set --tp, --pp and "
                "--cp to 1, or --send-layers to 0"
            )
        if (self.dp_rank is None) != (self.incarnation is None) or (self.dp_rank or 0) >= self.dp:
            raise ConfigError(f"no rank {self.dp_rank} of dp {self.dp}; start an instance with --dp alone")

    @property
    def size(self) -> ParallelSize:
        """Ranks of each of its leaders."""
        return ParallelSize(self.tp, self.pp, self.cp)

    @property
    def label(self) -> str:
        """The instance's name in logs."""
        return self.name or str(self.role)

    @property
    def peer_host(self) -> str:
        """The address that peers are told."""
        return self.advertise_host or self.host

    @property
    def registry_url(self) -> str:
        """The registry's URL: the given one, or the one that this instance runs."""
        own = f"{self.tls.scheme}://{bracket(self.peer_host)}:{self.bootstrap_port}"
        return self.registry or own

    @property
    def served_model(self) -> str:
        """The name that clients ask for."""
        return served_name(self.model, self.engine.served_model_name)

    def derived(self, host: Host, size: ModelSize | None = None) -> dict[str, object]:
        """Values derived from the settings and the host; logged once at start."""
        return {
            "served_model": self.served_model,
            "ranks": self.leaders * self.size.ranks,
            "threads_per_worker": self.engine.threads(host, self.leaders * self.size.ranks),
            "kv_gib": round(self.kv_bytes(host, size) / 2**30, 3),
            "registry": self.registry_url,
            "encrypted": self.tls.enabled,
        }

    def check_memory(self, host: Host) -> None:
        """Raise ConfigError if `--kv-gib` is more than `host` has free."""
        check_memory(self.engine.kv_gib, 1, host)

    def kv_bytes(self, host: Host, size: ModelSize | None = None) -> int:
        """Bytes of the pool of each leader."""
        leaders = self.leaders
        return kv_pool_bytes(self.engine.kv_gib, host, leaders, size, self.engine.page_tokens, leaders)

    @property
    def leaders(self) -> int:
        """How many leaders this process stands for: all of the instance, or the one it is."""
        return self.dp if self.dp_rank is None else 1

    def leader(self, incarnation: str, dp_rank: int) -> InstanceConfig:
        """The configuration of the process of one DP rank; memory and threads are those of one already."""
        # Each worker of a leader has a data port of its own.
        steps = {name: self.size.ranks if name.endswith("data_port") else 1 for name in _PORTS}
        ports = {n: port + dp_rank * step for n, step in steps.items() if (port := getattr(self, n))}
        return dataclasses.replace(self, incarnation=incarnation, dp_rank=dp_rank, **ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """`segue frontend`: the HTTP server of a deployment. `secret` as in `InstanceConfig`."""

    registry: str = required(REGISTRY_HELP, metavar="URL")
    host: str = _client_host()
    port: int = _client_port()
    model: str | None = text(
        "where the tokenizer is (default: where the instances have the model)", metavar="PATH|NAME"
    )
    revision: str | None = text(REVISION_HELP, metavar="REV")
    served_model_name: str | None = text(
        "model name for clients (default: the name in the registry)", metavar="NAME"
    )
    name: str | None = text("name in logs and metrics (default: frontend)", metavar="NAME")
    secret_file: str | None = text("file with the deployment's shared secret", metavar="F")
    cache: str | None = text("folder for fetched and converted models", metavar="DIR")
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    limit: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        check_url(self.registry, encrypted=self.tls.enabled)

    @property
    def label(self) -> str:
        """The frontend's name in logs."""
        return self.name or "frontend"

    def derived(self) -> dict[str, object]:
        """Values derived from the settings; logged once at start."""
        return {
            "registry": self.registry,
            "policy": self.answers.policy,
            "authenticated": bool(self.secret),
            "encrypted": self.tls.enabled,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """`segue ps`, `drain`, `resume`: how the instances of a registry are asked; without `registry`, those of
    the deployments of this user on this host. `secret` as in `InstanceConfig`."""

    registry: str | None = text(
        f"{REGISTRY_HELP} (default: the deployments of this user on this host)", metavar="URL"
    )
    secret_file: str | None = text("file with the deployment's shared secret", metavar="F")
    tls: TlsConfig = field(default_factory=TlsConfig)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.registry is not None:
            check_url(self.registry, encrypted=self.tls.enabled)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig(OperatorConfig):
    """`segue doctor`. With `registry` it looks at the instances that are there, too."""

    registry: str | None = text(
        "look at the instances of this registry as well, which is named as with `segue ps`", metavar="URL"
    )
    cache: str | None = text("folder for fetched and converted models", metavar="DIR")


#: Configuration class of each command that has one.
COMMANDS: dict[str, type] = {
    "serve": ServeConfig,
    "prefill": InstanceConfig,
    "decode": InstanceConfig,
    "unified": InstanceConfig,
    "frontend": FrontendConfig,
}
