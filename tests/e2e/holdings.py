"""The exact resources of a node at rest: shared segments and descriptors by role, transport and peers.

The numbers are those of real deployments (one and two instances of each role, before and after load,
after a kill and a restart), where they did not change by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

State = dict[str, Any]

PEERS_OF = {"prefill": ("decode",), "decode": ("prefill",), "unified": ()}
#: A path of shm: the writer holds the mapped pool and table of grants of the other, a socket and a
#: pidfd; the other the socket and the pidfd. A path of tcp is one connection.
PATH_DESCRIPTORS = {
    "shm": {"prefill": 4, "decode": 2},
    "tcp": {"prefill": 1, "decode": 1},
}
#: A path of a library holds up to so many: its control stream, what the library listens at and polls, and its
#: connections, which come with the first writes. The fewest that a node ever had may be from before them.
LIBRARY_PATH = 14
#: A path of shm maps the pool and the table of grants of the other, at the writer only.
PATH_SEGMENTS = {
    "shm": {"prefill": 2, "decode": 0},
    "tcp": {"prefill": 0, "decode": 0},
}
#: A node has one connection to the registry for each query that waits there, and its client keeps those
#: open that a renewal and a query with other words took beside it.
REGISTRY_MORE = 2
#: The queries that wait there. One that was cut is asked again a moment later, so the fewest descriptors
#: that a node ever had may be from a moment without them.
REGISTRY_WAITS = {"frontend": 3, "prefill": 1, "decode": 1, "unified": 1}
#: A part that is the registry itself holds its clients' connections.
REGISTRY_CLIENT = max(REGISTRY_WAITS.values()) + REGISTRY_MORE


def faults(
    states: Mapping[str, State], transport: str, least: dict[str, int], registry_at: str = ""
) -> list[str]:
    """The reasons why the nodes of one deployment are not at rest.

    `transport` carries the KV (`shm` or `tcp`). `least` has, by node, the fewest descriptors that it ever
    had in its role beside those that its peers cost, and learns when nothing else is wrong: before a
    session or a path is there, its peers cost less. The node `registry_at` is the registry too.
    """
    roles = [state["role"] for state in states.values()]
    found = []
    descriptors: dict[str, tuple[int, int]] = {}
    for name, state in states.items():
        if not state["at_rest"]:
            found.append(f"{name} holds { ({k: v for k, v in state['tables'].items() if v}) }")
        found += [f"{name}: {problem}" for problem in state["problems"]]
        if state["pages"].get("quarantined"):
            found.append(f"{name} has {state['pages']['quarantined']} quarantined pages")
        role = state["role"]
        others = sum(roles.count(peer) for peer in PEERS_OF.get(role, ()))
        sessions = roles.count("frontend") + others
        if role == "frontend":
            sessions = len(roles) - roles.count("frontend")
        elif len(state["sessions"]) != sessions:
            found.append(f"{name} has {len(state['sessions'])} sessions, {sessions} peers are alive")
        if state["segments"] != (right := segments(role, transport, others)):
            found.append(f"{name} maps {state['segments']} shared segments instead of {right}")
        paths = others * PATH_DESCRIPTORS.get(transport, {}).get(role, 0)
        more = REGISTRY_MORE + REGISTRY_WAITS[role]
        if transport not in PATH_DESCRIPTORS:
            more += others * LIBRARY_PATH
        if name == registry_at:
            more += REGISTRY_CLIENT * (len(roles) - 1)
        descriptors[name] = state["descriptors"] - sessions - paths, more
    settled = not found
    for name, (own, more) in descriptors.items():
        as_role = f"{name} as {states[name]['role']}"
        if settled:
            least[as_role] = min(own, least.get(as_role, own))
        if as_role in least and own > least[as_role] + more:
            found.append(f"{name} has {own} descriptors beside its peers', it had {least[as_role]}")
    return found


def segments(role: str, transport: str, others: int) -> int:
    """How many shared segments a node maps that hands KV over with `others`."""
    if role == "frontend":
        return 0
    # Its pool; where shm is spoken also the table of what it grants. Alone, nobody writes to it.
    own = 2 if transport == "shm" and role != "unified" else 1
    return own + others * PATH_SEGMENTS.get(transport, {}).get(role, 0)
