"""The configuration of an application of Ray Serve, checked as a whole. Pure.

It has the form of segue's TOML file: entries at the top are for all parts that know them, a table (`prefill`,
`decode`, `unified`, `frontend`) for one. Beside segue's own settings stand those of `Placement` and of
`FleetEntries`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec

from segue.kv import ConfigError, Role
from segue.server.settings.commands import FrontendConfig, InstanceConfig
from segue.server.settings.layers import Layers, argv, build, settings

#: The place of an entry, in errors.
PLACE = "build_app"
#: Addresses for checks, without and with TLS; the real one is known once the registry runs.
_UNKNOWN = {scheme: f"{scheme}://127.0.0.1:1" for scheme in ("http", "https")}
INSTANCES = (Role.PREFILL, Role.DECODE, Role.UNIFIED)
#: Settings that Ray decides, with the reason.
_RAYS = {
    **dict.fromkeys(
        ("host", "advertise_host", "port", "advertise_port", "data_port", "advertise_data_port", "http_port"),
        "each actor takes the address of its node and free ports",
    ),
    "bootstrap_port": "give registry_port",
    "name": "each actor has a name of its own",
    "dp": "give more replicas",
    "kv_events_port": "several instances of one node cannot share a port",
}
_FRONTEND_RAYS = {
    "name": _RAYS["name"],
    "https_cert": "TLS for clients belongs before Ray's proxy",
    "https_key": "TLS for clients belongs before Ray's proxy",
    "shutdown_delay_s": "Serve stops sending requests to an actor before it ends the actor",
}
#: Entries of tables alone, and of the top alone, with the reason.
_TABLES = {"replicas": "each role has its own; give it in a table, such as decode"}
_TOPS = {"registry": "all parts have one registry; give it at the top"}

_Count = Annotated[int, msgspec.Meta(ge=0, le=1024)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=2**31)]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a part that are Ray's: actors, CPUs and resources of each, and whether no two of them
    are on one node."""

    replicas: _Count | None = None
    cpus: _Amount | None = None
    resources: dict[str, _Amount] = {}
    one_per_node: bool = False


class FleetEntries(msgspec.Struct, frozen=True, kw_only=True):
    """The entries at the top that are Ray's. `pairs`: gangs of a prefill and a decode instance on one node.
    `registry_port`: the port of the registry on the head node. `health_check_s`: seconds between two checks
    of an actor."""

    pairs: _Count = 0
    registry_port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)] = 8998
    health_check_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """One deployment: the settings of its processes (their addresses are filled in by its actors), how many
    there are and where."""

    config: InstanceConfig | FrontendConfig
    role: Role
    replicas: int
    cpus: float
    resources: Mapping[str, float]
    one_per_node: bool

    @property
    def threads(self) -> int:
        """Threads of each process that computes."""
        return 1 if isinstance(self.config, FrontendConfig) else self.config.engine.threads_per_worker or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlan:
    """The deployments of one application. `instances` have one role each; `pair` has the parts of a gang, or
    nothing. `registry` is that of the configuration; without one the application runs it."""

    instances: tuple[PartPlan, ...]
    pair: tuple[PartPlan, ...]
    pairs: int
    frontend: PartPlan
    registry: str | None
    registry_port: int
    health_check_s: float

    @property
    def gang(self) -> PartPlan:
        """The actors of all pairs. Actors of one deployment are equal: each has the resources of the larger
        part, and the longer drain."""
        one, other = self.pair
        names = {**one.resources, **other.resources}
        return replace(
            max(self.pair, key=lambda part: part.config.limit.drain_s),
            replicas=2 * self.pairs,
            cpus=max(one.cpus, other.cpus),
            resources={name: max(part.resources.get(name, 0.0) for part in self.pair) for name in names},
            one_per_node=False,
        )

    def version(self, *parts: PartPlan) -> str:
        """Differs if actors of `parts` must be replaced. Counts do not change it."""
        words = [
            (part.role.value, part.cpus, sorted(part.resources.items()), argv(part.config)) for part in parts
        ]
        return hashlib.sha256(repr((words, self.registry, self.registry_port)).encode()).hexdigest()[:16]


def plan(config: Mapping[str, Any]) -> RayPlan:
    """The plan for `config`. Raises ConfigError that names a wrong key or value."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{PLACE} takes a dictionary of settings, not {type(config).__name__}")
    for table in ("", *_KNOWN):
        for key in _table(config, table) if table else config:
            if not isinstance(key, str):
                raise ConfigError(f"{key!r} in {PLACE} is not a setting; remove it")
    fleet = _struct(FleetEntries, config, _FLEET)
    alone = Role.UNIFIED in config and not {Role.PREFILL, Role.DECODE} & set(config)
    usual = dict.fromkeys((Role.PREFILL, Role.DECODE), 0 if fleet.pairs or alone else 1)
    usual |= {Role.UNIFIED: int(Role.UNIFIED in config), Role.FRONTEND: 1}
    parts = {role: _part(role, config, count) for role, count in usual.items()}
    prefill, decode, frontend = parts[Role.PREFILL], parts[Role.DECODE], parts[Role.FRONTEND]
    if not (fleet.pairs or parts[Role.UNIFIED].replicas or (prefill.replicas and decode.replicas)):
        raise ConfigError(
            f"{PLACE} needs replicas of prefill and of decode, replicas of unified, or pairs; it has "
            f"{prefill.replicas} of prefill and {decode.replicas} of decode"
        )
    if not frontend.replicas:
        raise ConfigError(f"{PLACE} needs at least one of replicas in [frontend]")
    for part in (prefill, decode):
        if fleet.pairs and part.one_per_node and not part.replicas:
            raise ConfigError(
                f"one_per_node of {part.role} in {PLACE}: a pair is packed on one node; remove it"
            )
    registry = frontend.config.registry
    return RayPlan(
        instances=tuple(parts[role] for role in INSTANCES if parts[role].replicas),
        pair=(prefill, decode) if fleet.pairs else (),
        pairs=fleet.pairs,
        frontend=frontend,
        registry=None if registry in _UNKNOWN.values() else registry,
        registry_port=fleet.registry_port,
        health_check_s=fleet.health_check_s,
    )


#: The table that stands for the entries of `FleetEntries`.
_FLEET = "ray"
_KNOWN = {
    role.value: [*settings(cls), *Placement.__struct_fields__]
    for role, cls in {**dict.fromkeys(INSTANCES, InstanceConfig), Role.FRONTEND: FrontendConfig}.items()
} | {_FLEET: list(FleetEntries.__struct_fields__)}


def _part(role: Role, config: Mapping[str, Any], usual: int) -> PartPlan:
    cls = FrontendConfig if role is Role.FRONTEND else InstanceConfig
    table = _table(config, role)
    top = {
        key: value for key, value in config.items() if not isinstance(value, Mapping) or key == "resources"
    }
    rays = _FRONTEND_RAYS if role is Role.FRONTEND else _RAYS
    for key in [*table, *top]:
        if (reason := rays.get(key.replace("-", "_"))) is not None:
            raise ConfigError(f"{key} in {PLACE}: {reason}; remove it")
        if key.replace("-", "_") == "api_key":
            raise ConfigError(f"api_key in {PLACE} would be stored by Ray: give api_key_file")
    for where, given, elsewhere in ((f"[{role}] of {PLACE}", table, _TOPS), (PLACE, top, _TABLES)):
        if found := given.keys() & elsewhere.keys():
            raise ConfigError(f"{min(found)} in {where}: {elsewhere[min(found)]}")
    placement = _struct(Placement, config, role)
    scheme = "https" if {"tls_cert", "tls-cert"} & {*table, *top} else "http"
    entries = {"registry": _UNKNOWN[scheme], "port": 0, **_without_resources(config)}
    layers = Layers({}, {}, entries, PLACE)
    fixed = {} if role is Role.FRONTEND else {"role": role}
    made: Any = build(cls, layers, command=role, known=_KNOWN, fixed=fixed)
    if isinstance(made, InstanceConfig):
        made, cpus = _sized(made, placement.cpus)
    else:
        cpus = 1.0 if placement.cpus is None else placement.cpus
        # Ray's proxy passes on the name by which clients know it.
        access = made.access
        made = replace(made, access=replace(access, allowed_hosts=access.allowed_hosts or "*"))
    return PartPlan(
        config=made,
        role=role,
        replicas=usual if placement.replicas is None else placement.replicas,
        cpus=cpus,
        resources=placement.resources,
        one_per_node=placement.one_per_node,
    )


def _sized(config: InstanceConfig, cpus: float | None) -> tuple[InstanceConfig, float]:
    """`config` with its threads, and its CPUs: each follows from the other."""
    ranks = config.size.ranks
    threads = config.engine.threads_per_worker
    if threads is None:
        threads = max(1, int((cpus or 1) // ranks))
        config = replace(config, engine=replace(config.engine, threads_per_worker=threads))
    return config, float(threads * ranks) if cpus is None else cpus


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} in {PLACE} must be a dictionary of settings, not {table!r}")
    return table


def _without_resources(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` for the reader of TOML files, to which each dictionary is a table."""
    top = {key: value for key, value in config.items() if key != "resources"}
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in top.items()}


_Entries = TypeVar("_Entries", Placement, FleetEntries)


def _struct(cls: type[_Entries], config: Mapping[str, Any], table: str) -> _Entries:
    """The entries of `cls` in `config`, at the top and in `table`."""
    entries = {key.replace("-", "_"): value for key, value in {**config, **_table(config, table)}.items()}
    try:
        return msgspec.convert({k: v for k, v in entries.items() if k in cls.__struct_fields__}, cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{PLACE}: {error}") from None
