"""The settings of the segue backend, and the SGLang configurations that it refuses at the start. Pure.

SGLang has no option for settings of a transfer backend: they are environment variables.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from segue.integrations.device_memory import DeviceMemory, device_refusal
from segue.integrations.host_rules import check_rules, is_loopback
from segue.kv import ChecksumMode, ConfigError

PREFIX = "SEGUE_SGLANG_"
#: Versions of SGLang with which the backend was run.
TRIED_VERSIONS = ("0.5.23",)
_LOOPBACK = ("localhost", "127.0.0.0/8", "::1/128")
#: Not link-local addresses: clouds have their metadata services there.
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")


class BackendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings, each an environment variable: `host` is SEGUE_SGLANG_HOST."""

    #: where sessions and KV are served, and what peers are told
    host: str = "127.0.0.1"
    advertise_host: str = ""
    #: a file with the deployment's secret, at least 16 bytes; without it only loopback is contacted
    secret_file: str = ""
    #: names, addresses and networks (CIDR) of the bootstrap servers that decode may ask, between commas;
    #: empty: `_LOOPBACK`, and with a secret also `_PRIVATE`
    bootstrap_hosts: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    kv_checksum: ChecksumMode = ChecksumMode.FULL
    #: KV in the memory of a GPU, copied through host memory: never run on one
    device_memory: DeviceMemory = ""

    def __post_init__(self) -> None:
        check_rules(self.host_rules)

    @property
    def host_rules(self) -> tuple[str, ...]:
        """The rules for hosts of bootstrap servers."""
        listed = tuple(rule for part in self.bootstrap_hosts.split(",") if (rule := part.strip()))
        return listed or (_LOOPBACK + _PRIVATE if self.secret_file else _LOOPBACK)


def backend_settings(environ: Mapping[str, str]) -> BackendSettings:
    """The settings in an environment. Raises ConfigError that names a wrong or unknown variable."""
    found = {}
    known = BackendSettings.__struct_fields__
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).lower()
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1, cutoff=0.7)
            near = f"did you mean {PREFIX}{close[0].upper()}?" if close else "there is no such setting"
            raise ConfigError(f"{name}: {near}")
        found[field] = value
    try:
        return msgspec.convert(found, BackendSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{PREFIX}*: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts:
    """The parts of SGLang's configuration that the backend needs to start."""

    device: str = "cpu"
    pipeline_stages: int = 1
    context_ranks: int = 1
    decode_context_ranks: int = 1
    kv_sharding: bool = False
    allocation_policy: str = "early"
    host_receive: bool = False
    staging_buffer: bool = False
    deferred_release: bool = True
    rust_server: bool = False
    #: SGLang's metadata lies in the device's memory, too
    device_metadata: bool = False


def check_scheduler(facts: SchedulerFacts, device_memory: DeviceMemory = "") -> None:
    """Raises ConfigError, with what to change, for a configuration whose KV the backend cannot hand over.
    `device_memory` is the setting."""
    device = device_refusal(facts.device, device_memory, f"{PREFIX}DEVICE_MEMORY=unverified")
    refused = [
        (bool(device), device),
        (
            facts.device_metadata,
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL, with which metadata lies on the device: unset it",
        ),
        (facts.pipeline_stages != 1, f"--pp-size {facts.pipeline_stages}: start with --pp-size 1"),
        (facts.context_ranks != 1, "context parallelism of prefill: start without it"),
        (facts.decode_context_ranks != 1, "context parallelism of decode: start without it"),
        (facts.kv_sharding, "--enable-kv-cache-sharding: start without it"),
        (
            facts.allocation_policy != "early",
            f"--disaggregation-decode-allocation-policy {facts.allocation_policy}: use early",
        ),
        (facts.host_receive, "--disaggregation-decode-host-receive-threshold below 1: leave it out"),
        (facts.staging_buffer, "SGLANG_DISAGG_STAGING_BUFFER: unset it"),
        (
            not facts.deferred_release,
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0, which gives pages away that a peer may "
            "write into: unset it",
        ),
        (facts.rust_server, "SGLANG_RUST_SERVER, whose registry does not know segue's leaders: unset it"),
    ]
    for wrong, what in refused:
        if wrong:
            raise ConfigError(f"the segue backend does not support {what}")


def version_refusal(version: str) -> str | None:
    """Why the backend does not work with this version of SGLang, in a sentence; None if it was tried."""
    if version in TRIED_VERSIONS:
        return None
    tried = ", ".join(TRIED_VERSIONS)
    return (
        f"segue is no transfer backend of SGLang {version}: it was run with {tried} alone; install that one"
    )


def may_contact(host: str, secret: bytes) -> bool:
    """Whether decode opens a session to `host`, which the bootstrap server named: with a `secret` any, since
    the session is authenticated; without one loopback alone."""
    return bool(secret) or is_loopback(host)
