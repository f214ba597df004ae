"""Settings of the KV events that an instance publishes over ZMQ."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from segue.kv import ConfigError
from segue.server.settings.layers import integer, text


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Off without a port. To each port a DP rank adds its number, as vLLM does; under `segue serve` the
    instances follow one another, each with as many ports as it has DP ranks."""

    kv_events_port: int | None = integer(
        "publish changes of the prefix cache, with their tokens, in vLLM's format over ZMQ at this port of "
        "--kv-events-host; every client that reaches it can read the tokens of all prompts",
        low=1,
        high=65535,
    )
    kv_events_host: str = text(
        "address of these ports; beyond loopback every host that reaches it reads the tokens of all prompts",
        "127.0.0.1",
        metavar="HOST",
    )
    kv_events_replay_port: int | None = integer(
        "port for subscribers to request missed events", low=1, high=65535
    )
    kv_events_topic: str = text("topic of these events", "", metavar="TOPIC")

    def __post_init__(self) -> None:
        others = self.kv_events_replay_port or self.kv_events_topic or self.kv_events_host != "127.0.0.1"
        if self.kv_events_port is None and others:
            raise ConfigError(
                "--kv-events-replay-port, --kv-events-host and --kv-events-topic need --kv-events-port"
            )

    def check(self, leaders: int) -> None:
        """Raise ConfigError unless each of so many leaders has ports of its own."""
        port, replay = self.kv_events_port, self.kv_events_replay_port
        for flag, first in (("--kv-events-port", port), ("--kv-events-replay-port", replay)):
            if first is not None and first + leaders > 2**16:
                raise ConfigError(f"{flag} {first} leaves no ports for {leaders} ranks")
        if port is not None and replay is not None and abs(port - replay) < leaders:
            raise ConfigError(
                f"--kv-events-port {port} and --kv-events-replay-port {replay} must be {leaders} apart: each "
                "rank takes a port of its own from each on"
            )

    def after(self, leaders: int) -> KVEventsConfig:
        """The ports of an instance that follows `leaders` leaders."""
        ports = {
            name: port + leaders
            for name in ("kv_events_port", "kv_events_replay_port")
            if (port := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **ports)
