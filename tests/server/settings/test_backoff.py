"""Pauses between tries."""

from segue.kv.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next_s() for _ in range(4)] == [0.1, 0.2, 0.4, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_each_is_drawn_between_its_half_and_its_whole() -> None:
    asked: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    backoff = Backoff(1.0, 3.0, uniform=uniform)
    assert [backoff.next_s() for _ in range(3)] == [0.5, 1.0, 1.5]
    assert asked == [(0.5, 1.0), (1.0, 2.0), (1.5, 3.0)]
