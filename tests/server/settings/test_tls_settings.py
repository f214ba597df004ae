"""TLS as settings: from flags, variables and files, on to the children; the registry must agree."""

from __future__ import annotations

import pytest

from segue.engine.pool_size import Host
from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.settings.commands import (
    COMMANDS,
    DoctorConfig,
    FrontendConfig,
    InstanceConfig,
    OperatorConfig,
    ServeConfig,
)
from segue.server.settings.layers import Layers, argv, build, settings
from segue.server.settings.shared_config import TlsConfig

KNOWN = {command: list(settings(cls)) for command, cls in COMMANDS.items()}
FILES = {"SEGUE_TLS_CERT": "c.pem", "SEGUE_TLS_KEY": "k.pem", "SEGUE_TLS_CA": "a.pem"}
HOST = Host(cores=2, free_bytes=2**34)
FLAGS = ["--tls-cert=c.pem", "--tls-key=k.pem", "--tls-ca=a.pem"]


def serve(**environ: str) -> ServeConfig:
    return build(ServeConfig, Layers(environ=environ), command="serve", known=KNOWN)


def test_serve_hands_tls_on_to_every_child_and_the_registry_is_https() -> None:
    config = serve(**FILES)
    assert config.tls.enabled
    for child in (
        config.instance(Role.PREFILL, "p", HOST, "https://127.0.0.1:1"),
        config.instance(Role.DECODE, "d", HOST, "https://127.0.0.1:1"),
        config.frontend("https://127.0.0.1:1"),
    ):
        assert child.tls == config.tls
        assert set(FLAGS) <= set(argv(child))
        assert child.derived()["encrypted"] is True if isinstance(child, FrontendConfig) else True
    assert not serve().tls.enabled


@pytest.mark.parametrize("url", ["http://127.0.0.1:8998", "https://127.0.0.1:8998"])
def test_the_registry_and_the_files_must_agree(url: str) -> None:
    environ = FILES if url.startswith("http:") else {}
    layers = Layers(environ={"SEGUE_MODEL": "m", "SEGUE_REGISTRY": url, **environ})
    with pytest.raises(ConfigError, match=r"--tls-cert.*https|https.*--tls-cert"):
        build(InstanceConfig, layers, command="decode", known=KNOWN, fixed={"role": Role.DECODE})
    with pytest.raises(ConfigError, match=r"--tls-cert.*https|https.*--tls-cert"):
        build(FrontendConfig, layers, command="frontend", known=KNOWN)
    tls = TlsConfig(**{name.removeprefix("SEGUE_").lower(): file for name, file in environ.items()})
    for cls in (OperatorConfig, DoctorConfig):
        with pytest.raises(ConfigError, match=r"--tls-cert.*https|https.*--tls-cert"):
            cls(registry=url, tls=tls)


def test_a_prefill_that_runs_the_registry_names_it_by_its_scheme() -> None:
    layers = Layers(environ={"SEGUE_MODEL": "m", "SEGUE_ADVERTISE_HOST": "fd00::1", **FILES})
    config = build(InstanceConfig, layers, command="prefill", known=KNOWN, fixed={"role": Role.PREFILL})
    assert config.registry_url == "https://[fd00::1]:8998"


@pytest.mark.parametrize("missing", FILES)
def test_two_of_three_files_are_refused_by_name(missing: str) -> None:
    flag = "--" + missing.removeprefix("SEGUE_").lower().replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} missing"):
        serve(**{k: v for k, v in FILES.items() if k != missing})
