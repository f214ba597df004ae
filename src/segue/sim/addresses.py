"""Where the instances of a deployment listen, in this life and in the next."""

from __future__ import annotations

import random
from collections.abc import Sequence

from segue.sim.runtime import PORT

Address = tuple[str, int]


class Addresses:
    """One address for each instance. At first each has a host of its own; one that moves may come to a
    new port of anybody's host, or to an address that somebody else has left."""

    def __init__(self, names: Sequence[str], rng: random.Random) -> None:
        self._at: dict[str, Address] = {name: (f"127.0.1.{i + 1}", PORT) for i, name in enumerate(names)}
        self._hosts = [host for host, _ in self._at.values()]
        self._left: list[Address] = []
        self._moving: set[str] = set()
        self._ports = PORT
        self._rng = rng

    def of(self, name: str) -> Address:
        """Host and port of an instance in its present life."""
        return self._at[name]

    def move(self, name: str) -> None:
        """Its next life begins elsewhere."""
        self._moving.add(name)

    def settle(self, name: str) -> None:
        """Its next life begins, and its last one has ended: nobody listens where it was."""
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
