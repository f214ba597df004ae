"""Variables that Kubernetes sets in every pod, and names of flags in other servers."""

from __future__ import annotations

from operator import ne
from typing import Any

import pytest

from segue.cli.main import main, parser
from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.settings.commands import COMMANDS, InstanceConfig, ServeConfig
from segue.server.settings.flag_aliases import FLAG_ALIASES, IN_SERVE, LATER, is_service_link
from segue.server.settings.layers import Layers, build, hint, nearest, parse_toml, settings

KNOWN = {command: list(settings(cls)) for command, cls in COMMANDS.items()}
FLAGS = {command: made.words() for command, made in parser()[1].items()}


def service_links(service: str, address: str, ports: dict[str, tuple[int, str]]) -> dict[str, str]:
    """The variables that Kubernetes makes of a Service (`pkg/kubelet/envvars/envvars.go`): `ports` by name
    ("" for a single one without), each with its number and protocol; the first one is the Service's."""
    prefix = service.upper().replace("-", "_")
    shown = f"[{address}]" if ":" in address else address
    found: dict[str, str] = {f"{prefix}_SERVICE_HOST": address}
    for at, (name, (number, protocol)) in enumerate(ports.items()):
        url = f"{protocol.lower()}://{shown}:{number}"
        port = f"{prefix}_PORT_{number}_{protocol}"
        if at == 0:
            found |= {f"{prefix}_SERVICE_PORT": str(number), f"{prefix}_PORT": url}
        if name:
            found[f"{prefix}_SERVICE_PORT_{name.upper().replace('-', '_')}"] = str(number)
        found |= {
            port: url,
            f"{port}_PROTO": protocol.lower(),
            f"{port}_PORT": str(number),
            f"{port}_ADDR": address,
        }
    return found


def load(cls: type[Any], environ: dict[str, str], toml: str = "", **flags: object) -> tuple[Any, list[str]]:
    warnings: list[str] = []
    layers = Layers(flags, environ, parse_toml(toml, "segue.toml"), "segue.toml")
    command = "serve" if cls is ServeConfig else "prefill"
    fixed = {} if cls is ServeConfig else {"role": Role.PREFILL}
    made = build(
        cls, layers, command=command, known=KNOWN, also=["SEGUE_CONFIG"], fixed=fixed, warn=warnings.append
    )
    return made, warnings


ONE_PORT = {"": (80, "TCP")}
MANY_PORTS = {"http": (8000, "TCP"), "dns-udp": (53, "UDP"), "sig": (99, "SCTP")}


@pytest.mark.parametrize("ports", [ONE_PORT, MANY_PORTS])
@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
@pytest.mark.parametrize(
    "service",
    # the last four make variables with the names of settings: SEGUE_HTTP_PORT, SEGUE_DATA_PORT, …
    [
        "segue",
        "segue-frontend",
        "segue-prefill",
        "segue-service",
        "segue-http",
        "segue-data",
        "segue-bootstrap",
        "segue-advertise",
    ],
)
def test_variables_of_a_kubernetes_service_change_nothing(
    service: str, address: str, ports: dict[str, tuple[int, str]]
) -> None:
    environ = service_links(service, address, ports)
    assert load(ServeConfig, environ) == (ServeConfig(), [])
    made, warnings = load(InstanceConfig, environ, model="m")
    assert (made, warnings) == (InstanceConfig(model="m", role=Role.PREFILL), [])


def test_a_setting_beside_service_links_still_counts() -> None:
    environ = service_links("segue-frontend", "10.0.0.1", ONE_PORT) | {
        "SEGUE_PORT": "9000",
        "SEGUE_HOST": "::1",
    }
    made, warnings = load(ServeConfig, environ)
    assert (made.port, made.host, warnings) == (9000, "::1", [])


def test_no_setting_is_taken_for_a_service_link() -> None:
    for cls in COMMANDS.values():
        for setting in settings(cls).values():
            assert not is_service_link(setting.variable.removeprefix("SEGUE_"), "1"), setting.variable


@pytest.mark.parametrize("value", ["tcpx://h:1", "8000x", "http://10.0.0.1:80", "", "x tcp://h:1"])
def test_a_wrong_port_that_is_no_service_link_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="SEGUE_PORT must be a whole number"):
        load(ServeConfig, {"SEGUE_PORT": value})


def test_other_unknown_variables_are_warned_of_once_each() -> None:
    environ = {
        "SEGUE_PAGE_TOKEN": "8",
        "SEGUE_DECODE_CP": "2",
        "SEGUE_DEPLOYED_BY": "us",
        "SEGUE_TCP": "tcp://h:1",
    }
    made, warnings = load(ServeConfig, environ)
    assert made == ServeConfig()
    assert len(warnings) == 4
    said = dict(zip(sorted(environ), warnings, strict=True))
    assert all(name in text and "ignored" in text for name, text in said.items())
    assert "did you mean SEGUE_PAGE_TOKENS?" in said["SEGUE_PAGE_TOKEN"]
    assert "not in this version" in said["SEGUE_DECODE_CP"]
    assert "did you mean" not in said["SEGUE_DEPLOYED_BY"]


@pytest.mark.parametrize("key", sorted(LATER))
def test_what_does_nothing_is_refused_by_name(key: str) -> None:
    flag = "--" + key.replace("_", "-")
    assert all(flag not in words for words in FLAGS.values())
    assert "not in this version" in hint(flag, FLAGS["prefill"])
    with pytest.raises(ConfigError, match=r"not in this version.*start more instances"):
        load(ServeConfig, {}, toml=f"{key} = 1")


# ---- hints --------------------------------------------------------------------------------------


def slips(word: str) -> list[str]:
    """`word` with one letter left out, doubled or swapped with its neighbour."""
    found = {word[:i] + word[i + 1 :] for i in range(len(word))}
    found |= {word[:i] + word[i] + word[i:] for i in range(len(word))}
    found |= {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    return sorted(found - {word})


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_slip_in_a_flag_is_recognised(command: str) -> None:
    """Words of five letters or more; in shorter ones a typo is too large a part."""
    for flag in FLAGS[command]:
        if len(flag) < 7:
            continue
        alike = [f for f in FLAGS[command] if len(f) == len(flag) and sum(map(ne, f, flag)) <= 1]
        hints = [f" (did you mean {f}?)" for f in alike]  # --prefill-p is as near to two
        for wrong in slips(flag.removeprefix("--")):
            if f"--{wrong}" not in FLAGS[command]:
                assert nearest(f"--{wrong}", FLAGS[command]) in hints, wrong


#: Flags of vLLM, SGLang, llama.cpp and TGI that are not ours.
_ELSEWHERE = """
api-key-hash max-model-len max-num-seqs tensor-parallel-size pipeline-parallel-size data-parallel-size
gpu-memory-utilization kv-cache-dtype disaggregation-mode model-path dist-init-addr dist-timeout
tokenizer-path tokenizer-mode trust-remote-code load-format download-dir max-lora-rank lora-modules
chat-template response-role ssl-keyfile ssl-certfile ssl-ca-certs root-path middleware
enable-auto-tool-choice tool-call-parser reasoning-parser mem-fraction-static chunked-prefill-size
max-running-requests schedule-policy cuda-graph-max-bs attention-backend sampling-backend stream-interval
watchdog-timeout nnodes node-rank seed enforce-eager block-size swap-space cpu-offload-gb num-gpu-blocks
quantization speculative-config compilation-config kv-transfer-config kv-events-config otlp-traces-endpoint
n-gpu-layers ctx-size mlock no-mmap flash-attn max-input-length max-total-tokens max-batch-total-tokens
num-shard sharded hostname master-addr master-port json-model-override-args context-length device
"""


@pytest.mark.parametrize("word", _ELSEWHERE.split())
def test_a_flag_of_another_server_is_explained_or_not_taken_for_one_of_ours(word: str) -> None:
    """A wrong guess is worse than none: what is no slip of ours is in the table, or nothing is said."""
    said = hint(f"--{word}", FLAGS["serve"])
    assert "did you mean" not in said, f"--{word}: add it to FOREIGN, or be stricter"


#: Those that people try first, or that had no hint.
_EXPLAINED = """
max-model-len tensor-parallel-size gpu-memory-utilization kv-cache-dtype disaggregation-mode
model-path dist-init-addr trust-remote-code tp-size otlp-traces-endpoint json-output
reasoning-parser disaggregation-ib-device disable-radix-cache enable-prefix-caching stream-interval
schedule-policy watchdog-timeout dist-timeout max-total-tokens max-input-length num-shard hostname
response-role max-queued-requests
"""


@pytest.mark.parametrize("word", _EXPLAINED.split())
def test_what_people_try_first_is_explained(word: str) -> None:
    assert hint(f"--{word}", FLAGS["serve"]).startswith(": ")


def test_no_hint_says_what_is_not_so() -> None:
    assert "chat template" not in FLAG_ALIASES["reasoning_parser"], "reasoning is not parsed"
    assert "no RDMA" not in FLAG_ALIASES["disaggregation_ib_device"], "nixl, mooncake and mori have it"
    for key in ("enable_prefix_caching", "disable_radix_cache"):
        assert "unless the model keeps a state" in FLAG_ALIASES[key]
    assert "not logged" not in FLAG_ALIASES["log_requests"], "each is a line"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_flag_of_another_command_is_said_to_be_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {flag for other in COMMANDS for flag in FLAGS[other]} - set(FLAGS[command])
    for flag in sorted(others):
        assert main([command, f"{flag}=1"]) == 2
        said = capsys.readouterr().err
        at = [f"segue {name}" for name in COMMANDS if flag in FLAGS[name]]
        assert f"segue {command} does not know {flag}: it is a flag of {', '.join(at)}" in said
        key = flag.lstrip("-").replace("-", "_")
        assert ("; here it is " in said) is (command == "serve" and key in IN_SERVE)


def test_what_serve_calls_otherwise_exists_there() -> None:
    for key, text in IN_SERVE.items():
        assert key in settings(InstanceConfig)
        assert key not in settings(ServeConfig)
        named = [word.strip(",;.") for word in text.split() if word.startswith("--")]
        assert named
        assert set(named) <= set(FLAGS["serve"])


def test_the_table_names_only_flags_that_exist_and_shadows_none() -> None:
    known = {flag for command in COMMANDS for flag in FLAGS[command]} | {"--api-key", "--api-key-file"}
    for key, text in FLAG_ALIASES.items():
        assert "--" + key.replace("_", "-") not in known, f"{key} is a setting of ours"
        named = [word.strip(",;.") for word in text.split() if word.startswith("--")]
        assert [word for word in named if word not in known] == [], key
