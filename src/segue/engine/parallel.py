"""How many ranks one replica has, and which part of the work each of them does. Pure."""

from __future__ import annotations

import msgspec

from segue.kv import RankCoord


class ParallelSize(msgspec.Struct, frozen=True):
    """Ranks of one replica along each axis: `tp` share out each layer's heads and weights, `pp` the layers,
    `cp` the rows of a prompt's chunk. Ranks are numbered with `tp` fastest, then `cp`, then `pp`; rank 0 is
    the leader's own."""

    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.cp

    def coord(self, rank: int) -> RankCoord:
        """The coordinates of `rank`."""
        rest, tp = divmod(rank, self.tp)
        pp, cp = divmod(rest, self.cp)
        return RankCoord(pp=pp, cp=cp, tp=tp)


def share(total: int, index: int, size: int) -> range:
    """The part of `total` things that falls to `index` of `size`: neighbours, as equal as can be."""
    return range(total * index // size, total * (index + 1) // size)
