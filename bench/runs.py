"""How many pieces a hand-off has: `python bench/runs.py [--requests 3000] [--pages 4096]`.

Two pools of pages of 16 tokens with their prefix trees, as prefill and decode have them, and requests one
after the other: prompts of 128 to 2,000 tokens, half of them the continuation of an earlier one, outputs of
16 to 512 tokens, 16 sequences growing on decode at a time. What is freed stays cached, so both pools are full
and new requests evict. A piece is a run of pages that are neighbours on both sides; one is best.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass

from recorded import commit, quantile
from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree, allocate_evicting
from segue.kv.ids import Span
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import KVShape, PoolSpec

SIZE = 16
SHAPE = KVShape(layers=1, kv_heads=1, k_dim=1, v_dim=1, dtype="int8", item_bytes=1)


class Side:
    """The pages of one instance."""

    def __init__(self, pages: int) -> None:
        self.pool = PagePool(pages, SIZE)
        self.tree = PrefixTree(self.pool, SIZE)

    def take(self, tokens: list[int], room: int) -> tuple[list[int], int]:
        """Pages for a prompt, and how many tokens of it are cached in the first of them."""
        match = self.tree.match(tokens[: (len(tokens) - 1) // SIZE * SIZE])
        missing = -(-len(tokens) // SIZE) - len(match.pages)
        after = match.pages[-1] if match.pages else None
        return match.pages + allocate_evicting(self.pool, self.tree, missing, after, room), match.tokens

    def leave(self, tokens: list[int], pages: list[int]) -> None:
        """The end of a sequence: its whole pages are cached."""
        whole = len(tokens) // SIZE
        self.tree.insert(tokens[: whole * SIZE], pages[:whole])
        self.pool.release(pages)


@dataclass
class Growing:
    """A sequence on decode."""

    tokens: list[int]
    pages: list[int]
    end: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--pages", type=int, default=4096)
    args = parser.parse_args()
    rng = random.Random(1)
    prefill, decode = Side(args.pages), Side(args.pages)
    spec = PoolSpec(shape=SHAPE, pages=args.pages, page_tokens=SIZE, layer_count=1, head_count=1)
    plan = plan_pair([spec], [spec])
    growing: list[Growing] = []
    said: list[list[int]] = []
    pieces: list[int] = []
    hits: list[float] = []
    for _ in range(args.requests):
        prompt = [rng.randrange(50_000) for _ in range(rng.randint(128, 2000))]
        if said and rng.random() < 0.5:
            prompt = (rng.choice(said[-64:]) + prompt[:200])[:2000]
        source, hit = prefill.take(prompt, 0)
        output = rng.randint(16, 512)
        target, cached = decode.take(prompt, output // SIZE)
        blocks = plan.blocks(0, 0, Span(cached, len(prompt)), source, target, 0)
        pieces.append(len({(b.src_offset, b.dst_offset) for b in blocks}))
        hits.append(hit / len(prompt))
        prefill.leave(prompt, source)
        growing.append(Growing(prompt, target, len(prompt) + output))
        while len(growing) == 16:  # until one of them has ended
            for each in growing:
                each.tokens = [*each.tokens, rng.randrange(50_000)]
                if len(each.tokens) > len(each.pages) * SIZE:
                    each.pages += allocate_evicting(decode.pool, decode.tree, 1, each.pages[-1], 0)
            for each in [each for each in growing if len(each.tokens) >= each.end]:
                growing.remove(each)
                decode.leave(each.tokens, each.pages)
                said.append(each.tokens)
    late = pieces[len(pieces) // 4 :]  # when both pools are full
    print(f"{len(late)} hand-offs, commit {commit()}")
    print(f"one piece: {sum(n == 1 for n in late) / len(late):.0%}; mean {statistics.mean(late):.1f}")
    print(f"p50 {quantile(late, 0.5):g}, p90 {quantile(late, 0.9):g}, most {max(late)}")
    print(f"of a prompt prefill has in its cache: {statistics.mean(hits[len(hits) // 4 :]):.1%}")


if __name__ == "__main__":
    main()
