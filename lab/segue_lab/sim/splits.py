"""How the two sides of a deployment divide the model among the ranks of each leader."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import msgspec

from segue.kv.ids import RankCoord, Role
from segue.kv.layout.spec import PlaneSpec, PoolSpec, planes_of


class Split(NamedTuple):
    """The parallel sizes of one side."""

    pp: int = 1
    cp: int = 1
    tp: int = 1

    def ranks(self, whole: PoolSpec) -> list[PoolSpec]:
        """The pool of each rank, all of them in one memory. It has the pool `whole` so many times that ranks
        which hold the same have no byte in common."""
        if self == Split():
            return [whole]
        shape, kinds = whole.shape, whole.kinds
        heads = [(shape.kv_heads * t // self.tp, shape.kv_heads * (t + 1) // self.tp) for t in range(self.tp)]
        firsts = [first for first, _ in heads]
        copies = self.cp * max(map(firsts.count, firsts))
        found: list[PoolSpec] = []
        for p, c, t in itertools.product(range(self.pp), range(self.cp), range(self.tp)):
            layer, next_layer = shape.layers * p // self.pp, shape.layers * (p + 1) // self.pp
            head, next_head = heads[t]
            base = whole.nbytes * (c * copies // self.cp + firsts[:t].count(head))
            planes = planes_of(whole)[layer * kinds : next_layer * kinds]
            spec = msgspec.structs.replace(
                whole,
                coord=RankCoord(pp=p, cp=c, tp=t),
                layer_start=layer,
                layer_count=next_layer - layer,
                head_start=head,
                head_count=max(1, next_head - head),
                regions=(copies * whole.nbytes,),
                planes=tuple(
                    PlaneSpec(0, base + plane.part(head, 1).offset, *plane[1:4]) for plane in planes
                ),
            )
            found.append(spec)
        return found


class Splits(NamedTuple):
    """The splits of both sides, and the divided dimension: `heads` of each layer, or one latent."""

    prefill: Split = Split()
    decode: Split = Split()
    heads: int = 1
    latent: bool = False

    @property
    def layers(self) -> int:
        """The model has a multiple of so many layers."""
        return max(self.prefill.pp, self.decode.pp)

    @property
    def several(self) -> bool:
        """Whether a side has more ranks than one."""
        return self.prefill != Split() or self.decode != Split()

    def of(self, role: Role) -> Split:
        """The split of an instance's role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}.get(role, Split())


ALONE = Splits()
EQUAL = Splits(Split(pp=2), Split(pp=2))
#: Sides that are not alike, ranks that hold the same, and context parallelism.
UNEQUAL = (
    Splits(Split(pp=2), Split()),
    Splits(Split(), Split(pp=2)),
    Splits(Split(pp=2), Split(tp=2), heads=2),
    Splits(Split(tp=2), Split(tp=3), heads=3),
    Splits(Split(pp=3), Split(pp=2)),
)
ALIKE = (
    Splits(Split(), Split(tp=2), latent=True),
    Splits(Split(tp=2), Split(tp=2)),
    Splits(Split(pp=2), Split(tp=2), latent=True),
    Splits(Split(tp=2), Split(tp=4), heads=2),
    Splits(Split(tp=2), Split(pp=2), latent=True),
    Splits(Split(tp=2), Split()),
)
CONTEXT = (
    Splits(Split(cp=2), Split()),
    Splits(Split(cp=3), Split(tp=2), latent=True),
    Splits(Split(pp=2, cp=2), Split(pp=2)),
)


def draw_splits(seed: int, equal: bool) -> Splits:
    """The splits of a scenario: `equal` ones or one rank a side in six of ten seeds, others in the rest."""
    rng = random.Random(f"segue splits {seed}")
    if rng.random() < 0.4:
        return rng.choice(rng.choice((UNEQUAL, ALIKE, CONTEXT)))
    return EQUAL if equal else ALONE
