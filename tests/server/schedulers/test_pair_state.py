"""Both roles with a model whose sequences keep a state beside their KV: a slot for each, and no prefixes."""

from __future__ import annotations

import random

import pytest
from pair import FRONT, VOCAB, Pair

from segue.kv.errors import PeerLost
from segue.kv.protocol import events
from segue.kv.protocol.messages import Drained


def asked(pair: Pair, count: int, longest: int, most: int) -> dict[str, list[int]]:
    """Submit requests of which some are alike; what each is to be answered."""
    rng, wanted = random.Random(5), {}
    for i in range(count):
        prompt = [7] * rng.randint(0, 20) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        tokens = rng.randint(1, most)
        wanted[f"r{i}"] = pair.submit(f"r{i}", prompt, tokens)
    return wanted


@pytest.mark.parametrize("slots", [(1, 1), (2, 3), (3, 2)])
def test_requests_wait_for_slots_and_all_are_answered(slots: tuple[int, int]) -> None:
    pair = Pair(page_tokens=(4, 8), slots=slots)
    written: list[int] = []
    state_bytes = pair.prefill.engine.spec.shape.state_bytes
    token_bytes = pair.prefill.engine.spec.shape.token_bytes

    def see(effect: events.Effect) -> bool:
        if isinstance(effect, events.PostWrite):
            written.append(sum(block.nbytes for block in effect.blocks))
        return False

    pair.lose = see
    wanted = asked(pair, 24, 40, 12)
    prompts = [len(s.prompt) for s in pair.prefill.scheduler.admission.requests.values()]
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted
    assert sum(written) == sum(prompts) * token_bytes + len(prompts) * state_bytes
    for node in (pair.prefill, pair.decode):
        assert node.scheduler.cache.tree.pages == 0, "nothing is reused"


def test_a_retracted_sequence_takes_its_state_along() -> None:
    pair = Pair(decode_pages=12, slots=(8, 5))
    wanted = asked(pair, 12, 9, 20)
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted
    assert pair.decode.scheduler.batch.retractions > 0


def test_a_published_slot_is_quarantined_with_its_pages_until_a_proof() -> None:
    pair = Pair(slots=(2, 2))
    pair.fences_proven = False
    pair.submit("r", list(range(9)), 4)
    pair.lose = lambda e: (
        isinstance(e, events.PostWrite) or (isinstance(e, events.Send) and isinstance(e.message, Drained))
    )
    pair.run()
    slots = pair.decode.scheduler.cache.slots
    assert slots is not None
    assert (slots.used, slots.quarantined) == (1, 0)
    pair.part()
    pair.run()
    assert (slots.used, slots.quarantined) == (0, 1)
    assert pair.decode.scheduler.load().slots == {"used": 0, "free": 1, "quarantined": 1}
    pair.lose = lambda _e: False
    pair.join()
    pair.run()
    assert (slots.free, slots.quarantined) == (2, 0)
    pair.prefill.scheduler.cancel(FRONT, "r", PeerLost("nobody else decodes").info, 0.0)


@pytest.mark.parametrize(
    ("slot", "prefix_tokens", "text"),
    [(None, 0, "slot None"), (2, 0, "slot 2 in a pool of 2"), (0, 4, "without the state at its end")],
)
def test_a_destination_without_a_place_for_the_state_is_refused(
    slot: int | None, prefix_tokens: int, text: str
) -> None:
    pair = Pair(slots=(2, 2), rests=False)
    pair.submit("r", list(range(9)), 4, to=(False, True))
    transfer = next(iter(pair.decode.handles))
    pages = tuple(range(prefix_tokens // 4, 3))
    with pytest.raises(Exception, match=text):
        pair.decode.exchange.handle(events.Publish(transfer, pages, prefix_tokens, slot), 0.0)
