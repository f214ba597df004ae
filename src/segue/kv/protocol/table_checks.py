"""What must be true of an exchange's tables at any time, looked at as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.kv.ids import LeaderId, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol.machine import Machine
from segue.kv.protocol.tombstones import ParkedDestination, Tombstone


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one exchange."""

    machines: Mapping[TransferId, Machine]
    parked: Mapping[TransferId, ParkedDestination]
    ended: Mapping[TransferId, Tombstone]
    epochs: Mapping[tuple[LeaderId, int], Machine]

    def problems(self, live_timers: int, limits: Limits) -> list[str]:
        """Every rule that does not hold, in words; empty if all is well. Looks at everything."""
        found = [rule for m in self.machines.values() if (rule := m.broken_rule())]
        for transfer, machine in self.machines.items():
            if machine.ended:
                found.append(f"{transfer} has ended but is kept")
            if not machine.phase.terminal and not machine.timer.live:
                found.append(f"{transfer} has no deadline")
            if machine.epoch and self.epochs.get((transfer.decode, machine.epoch)) is not machine:
                found.append(f"{transfer} cannot be found by its epoch")
        found += [f"{t} is live and early" for t in self.parked if t in self.machines]
        found += [f"{t} is live and ended" for t in self.ended if t in self.machines]
        found += [f"{t} is early and ended" for t in self.parked if t in self.ended]
        if len(self.epochs) != sum(machine.epoch != 0 for machine in self.machines.values()):
            found.append("an epoch outlived its transfer")
        if len(self.machines) > limits.max_transfers or len(self.ended) > limits.max_transfers:
            found.append("more transfers than limits.max_transfers")
        if len(self.parked) > limits.max_early_destinations:
            found.append("more early destinations than limits.max_early_destinations")
        timers = [m.timer for m in self.machines.values()]
        timers += [e.timer for e in self.parked.values()]
        timers += [e.timer for e in self.ended.values()]
        if sum(timer.live for timer in timers) != live_timers:
            found.append("the deadline heap and the tables disagree")
        return found
