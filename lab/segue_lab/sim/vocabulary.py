"""The words of a scenario: its features, the faults that each brings, and what can be wrong with what."""

from __future__ import annotations

from dataclasses import dataclass

#: The features of swarm testing: each seed draws a subset. Every fault belongs to one of them.
FEATURES = (
    "crash",
    "crash mid write",
    "pause",
    "pause mid write",
    "break",
    "front break",
    "partition",
    "slow link",
    "write fails",
    "path cut",
    "handler exception",
    "step exception",
    "sequence error",
    "engine refuses",
    "squeeze",
    "registry loss",
    "drain",
    "front crash",
    "client abort",
    "bad request",
    "skew",
    "small pools",
    "leg delay",
    "short deadline",
    "mismatch",
    "bit flip",
    "cut answers",
    "move",
    "role change",
)

#: Features that came later. They are drawn by a generator of their own, so that everything else
#: in a seed stays what it was.
LATER = (
    "metadata",
    "role exception",
    "front pause",
    "front partition",
)

#: Faults of the registry and at the listening ports; drawn by another generator, for the same reason.
AT_THE_DOORS = (
    "registry restart",
    "registry power loss",
    "registry pause",
    "registry partition",
    "no descriptors",
    "clock jump",
    "power loss",
    "session backlog",
)

#: Later features, with a generator of their own for the same reason.
NEWEST = (
    "tight pools",
    "endings",
    "unequal budgets",
    "engine exception",
    "plan exception",
    "digests",
    "copy flip",
)

#: Faults of data paths and of what they run on; drawn by a generator of their own as well.
DATA = (
    "data stall",
    "half open",
    "deaf port",
    "no data descriptors",
    "thread death",
    "connect raises",
    "full queues",
    "head flip",
    "write astray",
)


#: Features for lines that no seed ran; with a generator of their own again.
RARE = (
    "wrong messages",
    "effect exception",
    "event exception",
    "dial exception",
)

#: Faults that sessions and the two ends of a pair had not met; with a generator of their own again.
UNMET = (
    "two transports",
    "no memory",
    "fence exception",
    "rank lost",
    "address taken",
    "slow step",
)

#: Faults of a leader's own ranks; with a generator of their own again.
RANKS = (
    "rank diverges",
    "rank late",
)

#: Orders of operators; with a generator of their own again.
STEERED = ("switch",)

#: Rooms that prefill's engine opens before it knows decode; in half of the seeds that can have them.
UNPLACED = ("unplaced rooms",)

ALL_FEATURES = frozenset(
    {*FEATURES, *LATER, *AT_THE_DOORS, *NEWEST, *DATA, *RARE, *UNMET, *RANKS, *STEERED, *UNPLACED}
)

BAD = (
    "room 0",
    "negative room",
    "negative attempt",
    "nan budget",
    "infinite budget",
    "wrong replica",
    "repeated ticket",
    "repeated id",
    "token outside the vocabulary",
    "empty prompt",
    "long prompt",
    "mixed legs",
)

#: In what an instance differs from the others.
ODD = ("", "", "model", "layers", "layers", "model and layers")

#: Calls of a rank that may raise in its worker.
RANK_CALLS = ("connect", "write", "grant", "fence", "checksum")

#: Events after which a fault can be injected: right after the next one of these.
TRIGGERS = (
    "Publish",
    "Destination",
    "Accepted",
    "ChunkPosted",
    "Metadata",
    "Committed",
    "Failed",
    "Abort",
    "Drained",
    "Gone",
    "PostWrite",
    "ComputeChecksum",
    "Grant",
    "Fence",
    "Phase",
    "Release",
    "Quarantined",
    "<Destination",
    "<ChunkPosted",
    "<Metadata",
    "<Committed",
    "<Failed",
    "<Abort",
    "<Drained",
    "Outputs",
    "Outputs",
    "Outputs",
    "",
    "",
    "",
    "",
    "",
    "",
)


#: After these, the next thing that a node handles may well be a proof.
PROOFS = (
    "Fence",
    "Fence",
    "ComputeChecksum",
    "<Failed",
    "<Abort",
    "Abort",
    "<Drained",
    "PostWrite",
    "Destination",
    "",
    "",
)


@dataclass(frozen=True, slots=True)
class Draw:
    """How the faults of one kind are drawn: between one and `times` times the scenario's intensity of
    them (0: one), each on one of the processes called `where` and, if given, one of those called `other`."""

    kind: str
    times: int
    where: str
    other: str = ""
    seconds: tuple[float, ...] = (0.003, 0.05, 0.5, 4.0, 4.0)
    triggers: tuple[str, ...] = TRIGGERS


#: After these, or at any time, a role breaks on what it is told next.
ITEMS_AFTER = ("", "", "", "Destination", "PostWrite", "Fence", "Outputs")

_DOWN_S = (0.01, 0.3, 3.0)
_BRIEF_S = (0.01, 0.3)
#: The longer ones take longer than it takes to judge a silence, and than anybody may go on waiting behind it.
_SILENT_S = (0.05, 0.5, 4.0, 12.0)
#: Right after a token has gone out, when the answer is somebody's already.
_CUTS = ("Outputs",)

_CUT = Draw("path cut", 1, "prefill", "decode")

#: Faults of each feature. Features that are not here change the deployment, its requests or its clocks.
FAULTS: dict[str, tuple[Draw, ...]] = {
    "crash": (Draw("crash", 1, "any", seconds=_DOWN_S),),
    "crash mid write": (Draw("crash mid write", 1, "prefill", "decode", seconds=_BRIEF_S),),
    "pause": (Draw("pause", 1, "any"),),
    "pause mid write": (Draw("pause mid write", 2, "prefill", "decode"),),
    "break": (Draw("break", 2, "prefill", "decode"), Draw("break", 2, "decode", "prefill")),
    "front break": (Draw("front break", 2, "any", "front"),),
    "partition": (Draw("partition", 1, "one side", "other side", seconds=_SILENT_S),),
    "slow link": (Draw("slow link", 1, "prefill", "decode"),),
    "write fails": (Draw("write fails", 4, "prefill", "decode"),),
    "path cut": (Draw("path cut", 2, "prefill", "decode"),),
    # A handler that breaks on a proof is worth more tries than one that breaks anywhere.
    "handler exception": (Draw("handler exception", 3, "kv", triggers=PROOFS),),
    "step exception": (Draw("step exception", 2, "any"),),
    "sequence error": (Draw("sequence error", 2, "any"),),
    "engine refuses": (Draw("engine refuses", 2, "any"),),
    "squeeze": (Draw("squeeze", 2, "any"),),
    "registry loss": (Draw("registry loss", 0, "registry"),),
    "registry restart": (Draw("registry close", 0, "registry", seconds=_BRIEF_S),),
    "registry power loss": (Draw("registry silent loss", 0, "registry", seconds=_BRIEF_S),),
    "registry pause": (
        Draw("registry pause", 0, "registry", seconds=_SILENT_S),
        Draw("registry slow", 0, "registry", seconds=_SILENT_S),
    ),
    "registry partition": (
        Draw("registry partition", 1, "member", seconds=_SILENT_S),
        Draw("registry break", 2, "member"),
    ),
    "session backlog": (Draw("front partition", 1, "any", "front", seconds=_SILENT_S),),
    "no descriptors": (Draw("no descriptors", 1, "any", seconds=(0.05, 0.5, 3.0)),),
    "clock jump": (Draw("clock jump", 1, "any", seconds=(0.5, 3.0, 30.0)),),
    "power loss": (Draw("power loss", 0, "any", seconds=_DOWN_S),),
    "drain": (Draw("drain", 1, "any"),),
    "switch": (Draw("switch", 4, "any", seconds=(0.0, 0.003, 0.02, 0.1, 0.5)),),
    "front crash": (Draw("front crash", 0, "front", seconds=(0.1,)),),
    "bit flip": (
        Draw("wire flip", 3, "prefill", "decode"),
        Draw("page flip", 3, "decode"),
        Draw("session flip", 1, "any"),
    ),
    "cut answers": (
        Draw("crash", 2, "talker", seconds=_BRIEF_S, triggers=_CUTS),
        Draw("front break", 2, "talker", "front", triggers=_CUTS),
        Draw("drain", 2, "talker", triggers=_CUTS),
    ),
    "move": (Draw("move", 2, "any", seconds=_DOWN_S),),
    "role change": (Draw("role change", 2, "any", seconds=_DOWN_S),),
    "copy flip": (Draw("copy flip", 3, "any", triggers=("",)),),
    "metadata": (Draw("metadata", 3, "prefill", triggers=("",)),),
    "engine exception": (Draw("engine exception", 4, "any", triggers=("",)),),
    "plan exception": (Draw("plan exception", 2, "any", triggers=ITEMS_AFTER),),
    "digests": (Draw("digest slow", 2, "kv", triggers=("",)), Draw("digest fails", 2, "kv", triggers=("",))),
    "role exception": (Draw("role exception", 4, "any", triggers=ITEMS_AFTER),),
    "data stall": (Draw("data stall", 2, "prefill", "decode", seconds=_SILENT_S),),
    "half open": (Draw("half open", 2, "prefill", "decode"),),
    # These occur when a path that was cut is opened again.
    "deaf port": (Draw("deaf port", 1, "decode", seconds=_SILENT_S), _CUT),
    "no data descriptors": (Draw("no data descriptors", 1, "kv"), _CUT),
    "head flip": (Draw("head flip", 4, "prefill", "decode"),),
    "write astray": (Draw("write astray", 2, "prefill"),),
    "thread death": (Draw("thread death", 1, "kv", seconds=_DOWN_S),),
    "connect raises": (Draw("connect raises", 2, "prefill"), _CUT),
    "wrong messages": (Draw("wrong message", 12, "kv", triggers=("",)),),
    "fence exception": (Draw("fence exception", 4, "kv", triggers=("", "PostWrite", "<Abort")),),
    "rank lost": (Draw("rank lost", 1, "kv", seconds=_DOWN_S),),
    "rank diverges": (Draw("rank diverges", 1, "kv"),),
    # Shorter than a silence, so nobody is taken for dead.
    "rank late": (Draw("rank late", 2, "kv", seconds=(0.05, 0.3, 1.0)),),
    "slow step": (Draw("slow step", 1, "any", seconds=(0.5, 4.0, 12.0)),),
    "address taken": (Draw("address taken", 1, "any", seconds=_DOWN_S),),
    "no memory": (Draw("no memory", 2, "prefill", "decode"),),
    "effect exception": (Draw("effect exception", 3, "kv"),),
    "event exception": (Draw("event exception", 3, "kv"),),
    # Only decode dials; it does when a session has ended.
    "dial exception": (Draw("dial exception", 2, "decode", "prefill", triggers=("",)),),
    "front pause": (Draw("front pause", 1, "front", seconds=_SILENT_S),),
    "front partition": (
        Draw("front partition", 1, "any", "front", seconds=_SILENT_S),
        Draw("front partition", 1, "front", "any", seconds=_SILENT_S),
    ),
}

#: Faults of the metadata that prefill sends; the last one loses its session right before it.
SPOILED_METADATA = ("first token", "content", "prompt tokens", "lost")
#: Calls of the engine that can break, beside the forward itself.
ENGINE_CALLS = ("copy_out", "copy_in", "append", "close", "copy_out", "close")
#: On what a role can raise the next time: a method of its, or `on_change` with one of these.
ROLE_CALLS = (
    "submit",
    "cancel",
    "replace",
    "replace",
    "frontend_gone",
    "Phase",
    "Phase",
    "Release",
    "Quarantined",
    "Quarantined",
)
