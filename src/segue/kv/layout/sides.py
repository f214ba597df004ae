"""The KV that the ranks of one side hold: which ranks hold the same, and whether it is the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from segue.kv.errors import LayoutMismatch
from segue.kv.ids import RankCoord
from segue.kv.layout.content import Part, part_of
from segue.kv.layout.spec import PoolSpec

#: The boxes of one side, each with the ranks that hold it: for each place in context parallelism, in order.
Boxes = Mapping[Part, Sequence[Sequence[int]]]


def boxes_of(name: str, ranks: Sequence[PoolSpec]) -> Boxes:
    """The boxes that the ranks of the side `name` divide the model into.

    Raises LayoutMismatch where ranks contradict each other, or leave something out. Any two ranks must hold
    the same box or boxes without a common (layer, KV head). With context parallelism the ranks of each place
    hold the KV of all tokens, so at each of them there are all boxes.
    """
    _check_alike(name, ranks)
    places = 1 + max(spec.coord.cp for spec in ranks)
    found: dict[Part, dict[int, list[int]]] = {}
    for rank, spec in enumerate(ranks):
        found.setdefault(part_of(spec), {}).setdefault(spec.coord.cp, []).append(rank)
    shape = ranks[0].shape
    holder = np.full((shape.layers, shape.kv_heads), -1)
    for box, at in found.items():
        first = min(holders[0] for holders in at.values())
        if len(at) < places:
            none = next(cp for cp in range(places) if cp not in at)
            raise LayoutMismatch(
                f"rank {first} of {name} holds {_text(ranks[first])}, and no rank of cp {none} does; start "
                f"the ranks of all --cp {places}, each with the whole of its layers and KV heads"
            )
        cells = holder[
            box.layer_start : box.layer_start + box.layers, box.head_start : box.head_start + box.heads
        ]
        if cells.max() >= 0:
            one, other = int(cells.max()), first
            raise LayoutMismatch(
                f"ranks {one} and {other} of {name} hold partly the same: rank {one} {_text(ranks[one])}, "
                f"rank {other} {_text(ranks[other])}; give both the same, or nothing in common, for of ranks "
                f"that hold the same one receives and passes on all that it has"
            )
        cells[:] = first
    missing = np.argwhere(holder < 0)
    if len(missing):
        layer, head = missing[0]
        rest = f" (and {len(missing) - 1} more pairs of layer and KV head)" if len(missing) > 1 else ""
        raise LayoutMismatch(
            f"no rank of {name} holds layer {layer}, KV head {head}{rest}: {_all(ranks)}; declare every rank "
            "of the replica"
        )
    return {box: [at[cp] for cp in range(places)] for box, at in found.items()}


def _check_alike(name: str, ranks: Sequence[PoolSpec]) -> None:
    """All ranks of one side describe one model in pages of one size, each at a place of its own."""
    first = ranks[0]
    places: dict[RankCoord, int] = {}
    for rank, spec in enumerate(ranks):
        if spec.shape != first.shape:
            raise LayoutMismatch(f"rank {rank} of {name} has another KV shape than its rank 0: {spec.shape}")
        if spec.page_tokens != first.page_tokens:
            raise LayoutMismatch(
                f"rank {rank} of {name} has pages of {spec.page_tokens} tokens, its rank 0 of "
                f"{first.page_tokens}; start all ranks with one --page-tokens"
            )
        if spec.coord.cp and name == "decode":
            raise LayoutMismatch(
                f"rank {rank} of {name} is at cp {spec.coord.cp}; context parallelism is for computing "
                "prompts, and decode has none: start it with --cp 1"
            )
        if not 0 <= spec.coord.cp < len(ranks):
            raise LayoutMismatch(f"rank {rank} of {name} is at cp {spec.coord.cp} of {len(ranks)} ranks")
        if (one := places.setdefault(spec.coord, rank)) != rank:
            raise LayoutMismatch(
                f"ranks {one} and {rank} of {name} both say that they are {_place(spec)}; start each rank of "
                "the replica once"
            )


def _all(ranks: Sequence[PoolSpec]) -> str:
    """The part of each rank; of many ranks the first ones."""
    shown = [f"rank {rank} {_text(spec)}" for rank, spec in enumerate(ranks[:8])]
    return ", ".join(shown) + (
        f" and {len(ranks) - len(shown)} more ranks" if len(ranks) > len(shown) else ""
    )


def _text(spec: PoolSpec) -> str:
    layers = f"layers {spec.layer_start} to {spec.layer_start + spec.layer_count - 1}"
    heads = f"KV heads {spec.head_start} to {spec.head_start + spec.head_count - 1}"
    return f"{layers} and {heads} ({_place(spec)})"


def _place(spec: PoolSpec) -> str:
    return f"pp {spec.coord.pp}, cp {spec.coord.cp}, tp {spec.coord.tp}"
