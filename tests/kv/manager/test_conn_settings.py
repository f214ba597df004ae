"""Each setting of a leader reaches the part that obeys it, and none is made up on the way."""

from __future__ import annotations

from typing import Any

import pytest
from kv_sides import spec

from segue.kv.config import COUNTERPART, KVConfig, LeaderRuntime
from segue.kv.errors import ConfigError
from segue.kv.ids import ChecksumMode, Incarnation, LeaderId, RankId, Role
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT, DpRanks
from segue.kv.ranks.local_rank import local_rank
from segue.kv.transport.base import Endpoint
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.options import TransportOptions

ME, PEER = LeaderId(Incarnation("a" * 32), 2), LeaderId(Incarnation("b" * 32), 1)
SCRATCH = 4096
TLS: Any = object()


class Parts:
    """A runtime whose parts note what they are made from."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.options: dict[str, TransportOptions] = {}
        self.runtime: Any = LeaderRuntime(
            io=lambda _: self,  # type: ignore[arg-type, return-value]
            node=self.part("node"),
            transports=self,  # type: ignore[arg-type]
            digester=self.part("digester"),
            connecting=self.part("connecting"),
            exchange=self.part("exchange"),
        )

    def part(self, name: str) -> Any:
        def make(*args: Any, **options: Any) -> Parts:
            self.made[name] = args, options
            return self

        return make

    def for_memory(self, names: Any, memory: Any) -> list[str]:
        return list(names)

    def create(self, name: str, on_event: Any, options: TransportOptions) -> Parts:
        self.options[name] = options
        return self

    def register(self, memory: Any) -> Endpoint:
        return Endpoint("x", memory.nbytes, b"")

    def loaded(self, timeout_s: float) -> None: ...

    def new_epoch(self) -> int:
        return 1


def config(role: Role, **options: Any) -> KVConfig:
    """Every setting differs from its default and from every other one."""
    return KVConfig(
        role=role,
        me=ME,
        host="127.0.0.2",
        port=5,
        advertise="kv.example",
        advertise_port=7001,
        secret=b"s" * 32,
        limits=Limits(connect_s=7.0, max_transfers=9, max_sessions=3),
        tls=TLS,
        model="a model",
        spec=spec(),
        transports=["one", "two"],
        transport_port=6,
        advertise_transport_port=7002,
        dp=DpRanks(size=4, on_conflict=FAIL_ON_CONFLICT),
        kv_checksum=ChecksumMode.SAMPLED,
        staging_bytes=2**20,
        **options,
    )


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_each_setting_reaches_the_part_that_obeys_it(role: Role) -> None:
    set_to, parts = config(role), Parts()
    memory = allocate(set_to.spec.nbytes)
    try:
        manager = KVManager(set_to, memory, runtime=parts.runtime)
    finally:
        memory.close()
    _, node = parts.made["node"]
    assert node.pop("handlers") == {COUNTERPART[role]: manager}
    node.pop("message_type")
    names = ("me", "role", "secret", "limits", "tls", "advertise", "advertise_port")
    assert node == {name: getattr(set_to, name) for name in names}
    _, exchange = parts.made["exchange"]
    said = manager.compatibility.info
    assert (said.model, said.dp_size, said.max_transfers) == ("a model", 4, 9)
    assert said.ranks == [set_to.spec]
    assert list(said.endpoints) == ["one", "two"]
    assert exchange == {
        "role": role,
        "me": ME,
        "origin": f"{role.value} {ME}",
        "limits": set_to.limits,
        "kv_checksum": ChecksumMode.SAMPLED,
        "dp": set_to.dp,
    }
    options = TransportOptions(
        me=RankId(ME, 0),
        host="127.0.0.2",
        port=6,
        advertise="kv.example",
        advertise_port=7002,
        limits=set_to.limits,
        tls=TLS,
        staging_bytes=2**20,
    )
    assert parts.options == {"one": options, "two": options}
    assert parts.made["digester"][0][2:] == (9,), "as many wait as there may be hand-offs"


def test_each_rank_is_named_by_its_number() -> None:
    set_to, parts = config(Role.DECODE), Parts()
    memory = allocate(set_to.spec.nbytes)
    try:
        local_rank(set_to, memory, parts.runtime, 3)
        assert {options.me for options in parts.options.values()} == {RankId(ME, 3)}
    finally:
        memory.close()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"role": Role.UNIFIED}, "role"),
        ({"role": "prefill"}, "role"),
        ({"transports": []}, "transports"),
        ({"transports": "tcp"}, "transports"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_the_name_of_the_field(
    wrong: dict[str, Any], named: str
) -> None:
    settings: dict[str, Any] = {"role": Role.PREFILL, "model": "m", "spec": spec(), "transports": ["tcp"]}
    with pytest.raises(ConfigError, match=f"^{named}: "):
        KVConfig(**settings | wrong)
