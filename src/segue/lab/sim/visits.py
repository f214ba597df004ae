"""Everybody who may come to a deployment and is not of it, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.lab.sim.incompatible_peers import MISFIT_KINDS, Misfit
from segue.lab.sim.registry_abuse import GUEST_KINDS, Guest
from segue.lab.sim.visitor import Visitor
from segue.lab.sim.visits_authenticated import AUTHENTICATED
from segue.lab.sim.visits_between_nodes import BETWEEN_NODES
from segue.lab.sim.visits_unauthenticated import UNAUTHENTICATED

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment
    from segue.lab.sim.sim_leader import LeaderNode

#: Those who come to an instance's port as anybody might, and those who are several themselves.
VISITOR_KINDS = (*UNAUTHENTICATED, *AUTHENTICATED)
_VISITS = {**UNAUTHENTICATED, **AUTHENTICATED, **BETWEEN_NODES}
NODE_KINDS = tuple(BETWEEN_NODES)


def make_visitor(deployment: Deployment, target: LeaderNode, name: str, kind: str) -> Visitor | Guest:
    """One of `kind`, who comes to `target` or asks the registry about it."""
    if kind in GUEST_KINDS:
        return Guest(deployment, target, name, kind)
    if kind in MISFIT_KINDS:
        return Misfit(deployment, target, name, kind)
    return Visitor(deployment, target, name, kind, _VISITS[kind])


__all__ = ["GUEST_KINDS", "MISFIT_KINDS", "NODE_KINDS", "VISITOR_KINDS", "make_visitor"]
