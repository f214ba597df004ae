"""The application of Ray Serve that a plan stands for: a deployment for each role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import GangSchedulingConfig

from segue.integrations.ray.ray_actors import CHECK_S, MAX_REQUESTS, RayFrontend, RayInstance, RayRegistry
from segue.integrations.ray.ray_plan import PartPlan, RayPlan, plan
from segue.server.supervisor.process_tree import MARGIN_S

#: A resource that Ray gives to the head node alone.
_HEAD = {"node:__internal_head__": 0.001}


def build_app(config: Mapping[str, Any]) -> Any:
    """The application for `config` (docs/ray.md), for `serve.run` and for `args` in Serve's configuration.
    Raises ConfigError that names a wrong key."""
    made = plan(config)
    registry: Any = made.registry
    if registry is None:
        registry = (
            serve.deployment(RayRegistry)
            .options(name="registry", ray_actor_options={"num_cpus": 0, "resources": _HEAD})
            .options(version=made.version(made.frontend), _internal=True)
            .bind(made.frontend.config, made.registry_port)
        )
    nodes = [_deployment(RayInstance, made, part).bind((part,), registry) for part in made.instances]
    if made.pair:
        nodes.append(_pairs(made).bind(made.pair, registry))
    frontend = _deployment(RayFrontend, made, made.frontend).options(max_ongoing_requests=MAX_REQUESTS)
    return frontend.bind(made.frontend, registry, *nodes)


def _deployment(actor: type, made: RayPlan, part: PartPlan) -> Any:
    """Without its counts it has the same version in each plan, so that Serve changes counts in place."""
    options: dict[str, Any] = {"max_replicas_per_node": 1} if part.one_per_node else {}
    return (
        serve.deployment(actor)
        .options(
            name=part.role.value,
            num_replicas=part.replicas,
            ray_actor_options={"num_cpus": part.cpus, "resources": dict(part.resources)},
            health_check_period_s=made.health_check_s,
            health_check_timeout_s=2 * CHECK_S,
            graceful_shutdown_timeout_s=part.config.limit.drain_s + 2 * MARGIN_S,
            **options,
        )
        .options(version=made.version(part), _internal=True)
    )


def _pairs(made: RayPlan) -> Any:
    """Gangs of a prefill and a decode actor, packed on one node where one has room."""
    return (
        _deployment(RayInstance, made, made.gang)
        .options(name="pairs", gang_scheduling_config=GangSchedulingConfig(gang_size=2))
        .options(version=made.version(*made.pair), _internal=True)
    )
