"""The connection that is closed when too many wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.kv.pending import MAX_REASONS, PendingConnections, Refusals


def test_one_address_can_only_push_out_its_own() -> None:
    table: PendingConnections[str] = PendingConnections(8)
    assert table.add("good", "10.0.0.1") is None
    victims = [table.add(f"bad{i}", "10.9.9.9") for i in range(50)]
    assert victims[:4] == [None] * 4
    assert victims[4:] == [f"bad{i}" for i in range(46)]
    assert "good" in table
    assert len(table) == 5


def test_many_addresses_push_out_the_oldest_of_the_greediest() -> None:
    table: PendingConnections[str] = PendingConnections(6, per_host=3)
    for connection, host in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")):
        assert table.add(connection, host) is None
    assert table.oldest() == "a1"
    assert table.add("d1", "d") == "a1"
    assert table.discard("a1") is False
    assert table.discard("a2") is True
    assert table.oldest() == "b1"
    with pytest.raises(ValueError, match="positive"):
        PendingConnections(0)


def test_a_full_table_closes_one_of_the_address_that_has_most_and_not_who_came_first() -> None:
    table: PendingConnections[str] = PendingConnections(4, per_host=3)
    for connection, host in (("first", "a"), ("b1", "b"), ("b2", "b"), ("b3", "b")):
        assert table.add(connection, host) is None
    assert table.add("c1", "c") == "b1"
    assert table.add("d1", "d") == "b2"
    assert "first" in table


def test_of_addresses_that_have_as_many_each_the_longest_waiting_goes_and_not_the_newest() -> None:
    """A new connection proves itself in a moment; one that waits for long does not intend to."""
    table: PendingConnections[str] = PendingConnections(4, per_host=4)
    for connection, host in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        table.add(connection, host)
    table.discard("a1")  # the address that came first has only one that came later
    assert [table.add(connection, connection) for connection in ("c1", "d1")] == [None, None]
    assert [table.add(connection, connection) for connection in ("e1", "f1", "g1")] == ["b1", "a2", "c1"]
    assert set(table) == {"d1", "e1", "f1", "g1"}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.booleans()), max_size=80))
def test_it_is_bounded_and_forgets_whoever_left(steps: list[tuple[int, int, bool]]) -> None:
    table: PendingConnections[int] = PendingConnections(7)
    here: dict[int, int] = {}
    for connection, host, comes in steps:
        if comes and connection not in here:
            victim = table.add(connection, str(host))
            if victim is not None:
                del here[victim]
            here[connection] = host
        elif not comes:
            assert table.discard(connection) is (here.pop(connection, None) is not None)
        assert set(table) == set(here)
        assert len(table) <= 7
        assert table._of.keys() == {str(h) for h in here.values()}, "an address without one is forgotten"
        assert all(list(here.values()).count(h) <= 3 for h in set(here.values()))
    for connection in list(here):
        table.discard(connection)
    assert not len(table)
    assert table.oldest() is None


def test_reasons_beyond_those_that_are_told_apart_are_one_until_others_are_old() -> None:
    refusals = Refusals()
    said = [refusals.line(f"a refusal, {n}", f"reason {n}", 100.0) for n in range(2 * MAX_REASONS)]
    assert [line for line in said if line] == [f"a refusal, {n}" for n in range(MAX_REASONS + 1)]
    assert refusals.line("again", "reason 3", 159.0) == ""
    assert refusals.line("again", "reason 3", 160.0) == "again; 1 more since the last such line"
    assert refusals.line("new", "a new reason", 160.0) == "new"
