"""`kv_connector_extra_config`, and the vLLM configurations that the connector refuses at the start. Pure."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from segue.integrations.device_memory import DeviceMemory, device_refusal
from segue.integrations.host_rules import check_rules, is_loopback, matches
from segue.kv import ChecksumMode, ConfigError, Role

#: Methods of speculative decoding that keep no KV beside the model's.
_DRAFTS_WITHOUT_KV = {"", "ngram", "ngram_gpu", "suffix"}
#: Values of --kv-cache-dtype, and of tensors, whose numbers need no scales to be read.
PLAIN_DTYPES = {"auto", "float16", "bfloat16", "float32"}


class LoadFailurePolicy(enum.StrEnum):
    """vLLM's `kv_load_failure_policy`: a request whose KV did not come is computed here, or ends."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `kv_connector_extra_config`."""

    #: kinds of transport to offer; empty: all that work here
    transport: list[str] = []
    kv_checksum: ChecksumMode = ChecksumMode.FULL
    #: a file with the deployment's secret; without it only loopback is contacted
    secret_file: str = ""
    #: where sessions and KV are served, and what peers are told
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    transport_port: int = 0
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    #: seconds that prefill waits for decode, and decode for the KV
    room_s: float = 60.0
    #: seconds that prefill keeps the KV after decode has it. Above 0, another decode can have it if one fails
    retain_s: float = 0.1
    #: CPUs of the connector's threads; empty: all of the process's parent
    cpus: list[int] = []
    #: sessions, checksums and transports in a process of their own; the KV cache is a memfd then
    agent: bool = False
    #: KV in the memory of a GPU: never run on one
    device_memory: DeviceMemory = ""
    #: the port of `GET /query` on prefill; 0: none
    query_port: int = 0
    #: names, addresses and networks (CIDR) of prefill hosts that decode may contact without a signature
    peers: list[str] = []

    def __post_init__(self) -> None:
        if not 0 < self.room_s <= 3600:
            raise ValueError(f"room_s must be above 0 and at most 3600 seconds, not {self.room_s}")
        if not 0 <= self.retain_s <= 3600:
            raise ValueError(f"retain_s must be in 0 … 3600 seconds, not {self.retain_s}")
        for name in ("port", "transport_port", "query_port"):
            if not 0 <= getattr(self, name) < 2**16:
                raise ValueError(f"{name} must be in 0 … 65535, not {getattr(self, name)}")
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(tls) and not all(tls):
            raise ValueError("give tls_cert, tls_key and tls_ca, or none of them")
        check_rules(self.peers)


def parse_settings(extra: Mapping[str, object] | None) -> ConnectorSettings:
    """The settings in `kv_connector_extra_config`. Raises ConfigError that names a wrong or unknown key."""
    found = dict(extra or {})
    known = ConnectorSettings.__struct_fields__
    for key in found:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.7)
            near = f" (did you mean {close[0]}?)" if close else f"; the keys are {', '.join(known)}"
            raise ConfigError(f"kv_connector_extra_config has no key {str(key)[:100]!r}{near}")
    try:
        return msgspec.convert(found, ConnectorSettings)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The parts of vLLM's configuration that the connector needs to start: `kv_role`, the KV cache's dtype
    and the device; the number of KV cache groups, of each kind of parallel ranks and of KV heads; the method
    of speculative decoding; the kind of KV cache if it does not keep the KV of a whole prompt (a sliding
    window alone); and whether weights may be replaced at run time or memory given back (sleep mode)."""

    kv_role: str
    kv_dtype: str = "auto"
    device: str = "cpu"
    kv_cache_groups: int = 1
    pipeline_stages: int = 1
    tensor_ranks: int = 1
    kv_heads: int = 1
    data_ranks: int = 1
    context_ranks: int = 1
    draft_method: str = ""
    partial_cache: str = ""
    weight_updates: bool = False
    sleep_mode: bool = False


def check_engine(facts: EngineFacts, settings: ConnectorSettings) -> Role:
    """The role of a vLLM engine. Raises ConfigError for a configuration whose KV the connector cannot hand
    over whole, or not with these `settings`."""
    if facts.kv_role == "kv_both":
        raise ConfigError(
            "kv_role kv_both is not supported: start one vLLM with kv_producer and another with kv_consumer"
        )
    if facts.kv_role not in ("kv_producer", "kv_consumer"):
        raise ConfigError(f"kv_role must be kv_producer or kv_consumer, not {facts.kv_role!r}")
    device = device_refusal(
        facts.device, settings.device_memory, 'device_memory "unverified" in kv_connector_extra_config'
    )
    refused = [
        (bool(device), device),
        (
            facts.kv_dtype not in PLAIN_DTYPES,
            f"--kv-cache-dtype {facts.kv_dtype}: its scales are not in the KV",
        ),
        (facts.kv_cache_groups != 1, f"{facts.kv_cache_groups} KV cache groups (hybrid models)"),
        (
            bool(facts.partial_cache),
            f"a KV cache of {facts.partial_cache}, which does not keep the whole prompt",
        ),
        (facts.pipeline_stages != 1, f"--pipeline-parallel-size {facts.pipeline_stages}"),
        (
            facts.kv_heads % facts.tensor_ranks != 0,
            f"--tensor-parallel-size {facts.tensor_ranks} for {facts.kv_heads} KV heads",
        ),
        (
            facts.data_ranks != 1,
            f"--data-parallel-size {facts.data_ranks} of a mixture-of-experts model",
        ),
        (facts.context_ranks != 1, "context parallelism"),
        (
            facts.draft_method not in _DRAFTS_WITHOUT_KV,
            f"speculative decoding by {facts.draft_method}, whose layers have KV of their own",
        ),
        (facts.weight_updates, "weight updates at run time"),
        (facts.sleep_mode, "--enable-sleep-mode"),
        (
            settings.agent and facts.tensor_ranks != 1,
            f"agent with --tensor-parallel-size {facts.tensor_ranks}",
        ),
        (settings.agent and facts.device != "cpu", "agent with the memory of a GPU"),
    ]
    for wrong, what in refused:
        if wrong:
            raise ConfigError(f"the segue connector does not support {what}")
    return Role.PREFILL if facts.kv_role == "kv_producer" else Role.DECODE


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """Decides which prefill hosts decode contacts. With a `secret`: a host whose signature was verified, or
    one in `peers`; without a secret: loopback alone."""

    secret: bytes = b""
    peers: tuple[str, ...] = ()

    def allows(self, host: str, signed: bool) -> bool:
        """True if `host` may be contacted; `signed`: the params that name it have a valid signature."""
        if not self.secret:
            return is_loopback(host)
        return signed or any(matches(host, peer) for peer in self.peers)
