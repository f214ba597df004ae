"""Turns the settings of an instance into the hand-off's configuration of its leader and each of its ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from segue.kv import KINDS, USABLE, ChecksumMode, ConfigError, DpRanks, KVConfig, LeaderId, Memory, PoolSpec
from segue.kv.config import SessionConfig
from segue.kv.protocol.messages import HandoffMessage, PathChosen
from segue.kv.session import Tls
from segue.server.messages.control import ControlMessage
from segue.server.messages.operate import OperatorMessage
from segue.server.settings.commands import InstanceConfig

#: All that the sessions of a leader carry.
LeaderMessage = HandoffMessage | PathChosen | ControlMessage | OperatorMessage

log = logging.getLogger("segue.instance")


def session_config(config: InstanceConfig, me: LeaderId, tls: Tls | None) -> SessionConfig:
    """How the leader `me` talks to others."""
    return SessionConfig(
        role=config.role,
        me=me,
        host=config.host,
        port=config.port,
        advertise=config.advertise_host,
        advertise_port=config.advertise_port,
        secret=config.secret or None,
        limits=config.limit.limits(),
        tls=tls,
        messages=LeaderMessage,
    )


def dp_ranks(config: InstanceConfig) -> DpRanks:
    """The DP ranks of the instance."""
    return DpRanks(
        size=config.dp,
        load_balance=config.load_balance,
        force_query=config.force_query_prefill_dp_rank,
        on_conflict=config.dp_rank_conflict,
    )


def kv_config(
    config: InstanceConfig,
    me: LeaderId,
    *,
    model: str,
    spec: PoolSpec,
    transports: Sequence[str],
    tls: Tls | None,
    rank: int = 0,
) -> KVConfig:
    """The hand-off's configuration for rank `rank` of the leader `me`. A port that is given is that of rank
    0; each rank has the next one."""
    moves_bytes = all(KINDS.kind(name).moves_bytes for name in transports)
    advertised = config.advertise_data_port
    return KVConfig(
        **vars(session_config(config, me, tls)),
        model=model,
        spec=spec,
        transports=transports,
        transport_port=config.data_port + rank if config.data_port else 0,
        advertise_transport_port=None if advertised is None else advertised + rank,
        dp=dp_ranks(config),
        kv_checksum=ChecksumMode(config.kv_checksum) if moves_bytes else ChecksumMode.OFF,
    )


def usable_transports(setting: str, memory: Memory) -> tuple[str, ...]:
    """The transports to offer for `--transport`; of several, those that work here. Raises ConfigError if none
    does."""
    found = KINDS.offered(setting, memory)
    usable = tuple(name for name, reason in found.items() if reason == USABLE)
    for name, reason in found.items():
        if reason != USABLE:
            log.warning("%s cannot be used, only %s is offered: %s", name, ", ".join(usable), reason)
    if not usable:
        raise ConfigError(f"no transport works here: {found}; see segue doctor")
    return usable
