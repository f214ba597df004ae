"""The addresses of a deployment's leaders, in this incarnation and in the next."""

from __future__ import annotations

import random
from collections.abc import Sequence

from segue_lab.sim.node_spec import NodeSpec
from segue_lab.sim.runtime import PORT

Address = tuple[str, int]


class Addresses:
    """One address for each leader. At first each instance has a host of its own; a leader that moves may come
    to a new port of anybody's host, or to an address that somebody else has left."""

    def __init__(self, specs: Sequence[NodeSpec], rng: random.Random) -> None:
        hosts: dict[str, str] = {}
        for spec in specs:
            hosts.setdefault(spec.instance, f"127.0.1.{len(hosts) + 1}")
        self._at = {spec.name: (hosts[spec.instance], PORT + spec.dp_rank) for spec in specs}
        self._hosts = list(hosts.values())
        self._left: list[Address] = []
        self._moving: set[str] = set()
        self._ports = max(port for _, port in self._at.values())
        self._rng = rng

    def of(self, name: str) -> Address:
        """Host and port of a leader's present incarnation."""
        return self._at[name]

    def move(self, name: str) -> None:
        """The next incarnation of a leader has another address."""
        self._moving.add(name)

    def settle(self, name: str) -> None:
        """A new incarnation starts after the last one has ended: the old address is free."""
        if name not in self._moving:
            return
        self._moving.discard(name)
        free = [place for place in self._left if place not in self._at.values()]
        if free and self._rng.random() < 0.5:
            place = self._rng.choice(free)
            self._left.remove(place)
        else:
            self._ports += 1
            place = (self._rng.choice(self._hosts), self._ports)
        self._left.append(self._at[name])
        self._at[name] = place
