"""The invariants of an exchange's tables as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.kv.ids import LeaderId, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol.machine import Machine
from segue.kv.protocol.receptions import Receptions
from segue.kv.protocol.rooms import Rooms
from segue.kv.protocol.tombstones import Tombstone


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one exchange."""

    machines: Mapping[TransferId, Machine]
    rooms: Rooms
    receptions: Receptions
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
        rooms, receptions = self.rooms.rooms, self.receptions.receptions
        parked = [transfer for room in rooms.values() for transfer in room.parked]
        found += [f"{t} is live and early" for t in parked if t in self.machines]
        found += [f"{t} is live and ended" for t in self.ended if t in self.machines]
        found += [f"{t} is early and ended" for t in parked if t in self.ended]
        held = {transfer for room in rooms.values() for transfer in room.holding}
        held |= {r.machine.transfer for r in receptions.values() if r.machine is not None}
        found += [f"{t} belongs to no room or receiver" for t in self.machines.keys() - held]
        found += [f"{t} is held and has no machine" for t in held - self.machines.keys()]
        found += self.rooms.problems()
        if len(self.epochs) != sum(machine.epoch != 0 for machine in self.machines.values()):
            found.append("an epoch outlived its transfer")
        if len(self.ended) > limits.max_transfers:
            found.append("more tombstones than limits.max_transfers")
        if max(self.rooms.open, len(receptions)) > limits.max_transfers:
            found.append("more hand-offs than limits.max_transfers")
        if self.rooms.parked > limits.max_early_destinations:
            found.append("more early destinations than limits.max_early_destinations")
        timers = [m.timer for m in self.machines.values()]
        timers += [e.timer for e in self.ended.values()]
        timers += [r.timer for r in receptions.values()] + self.rooms.timers
        if sum(timer.live for timer in timers) != live_timers:
            found.append("the deadline heap and the tables disagree")
        return found
