"""The settings of the commands that look at a running fleet and steer it."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.server.settings.commands import TlsConfig
from segue.server.settings.layers import required, text
from segue.server.settings.registry_address import REGISTRY_HELP, check_url


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """`segue ps`, `drain`, `resume`: how the instances of a registry are asked. `secret` as in
    `InstanceConfig`."""

    registry: str = required(REGISTRY_HELP, metavar="URL")
    secret_file: str | None = text("file with the deployment's shared secret", metavar="F")
    tls: TlsConfig = field(default_factory=TlsConfig)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        check_url(self.registry, encrypted=self.tls.enabled)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """`segue doctor`. With `registry` it looks at the instances that are there, too. `secret` as in
    `InstanceConfig`."""

    registry: str | None = text(
        "look at the instances of this registry as well, which is named as with `segue ps`", metavar="URL"
    )
    secret_file: str | None = text("file with the deployment's shared secret", metavar="F")
    cache: str | None = text("folder for fetched and converted models", metavar="DIR")
    tls: TlsConfig = field(default_factory=TlsConfig)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.registry is not None:
            check_url(self.registry, encrypted=self.tls.enabled)
