"""Scripts over the pure protocol: events in, effects out, as text.

A script (`scripts/*.txt`) has cases. A command stands at the left edge; below it, indented, is its log: the
effects that the exchange has returned, in order.

    # Why this case is there.
    case TITLE from SETUP
    for word in Abort | Gone          the whole case for each value of $word; the log is the same for all
    ExpectRoom decode=d retain_s=0    an event of `kv/protocol/events.py`, with the fields that matter here
      Phase BOOTSTRAPPING
    d says Destination attempt=1      a message of `kv/protocol/messages.py` arrives from that leader
      Phase WAITING_FOR_INPUT peer=d
      > d Accepted attempt=1          a message to that leader
    - EndRoom left                    one of several ways to go on from what stands above the first dash
    - Tick                            another one

`setup NAME from SETUP` is what cases may build on: `from SETUP with decode=d` puts these words where it says
`$with`. Leaders are `d`, `e`, `f` of decode and `p`, `p1` … (DP
ranks) of prefill. `new p`, `new d` or `new p d` begins a world with these exchanges; a command is of the
first one, or of the one that it names (`d EndRoom left`). A word without `=` is the next field. What is left
out has the default of `Desk.fields`; the room is 7, the hand-off attempt 0 of `d` and `p` (`of=e/1`,
`room=8`). A line with `1..9` in it is carried out for each of these numbers. `at 5.0 …` sets the clock first.
`land`, `fenced`, `summed` answer what the ranks were asked. `p hears` gives it the next message of the other
exchange. `show NAMES` reads counts. `!` is an error that was raised; `?` says that a new attempt may succeed.

After each event the tables are checked, and that phases rise, pages are released once, and nothing is written
after `Gone`, `Moved` or `Drained`. After each case all that is open ends, and no table keeps anything.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
from handoff_world import Side, pool_spec

from segue.kv.errors import (
    AbortedByClient,
    ErrorCode,
    ErrorInfo,
    OutOfCapacity,
    PeerLost,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import (
    OPEN_RANK,
    ChecksumMode,
    Incarnation,
    KVPoll,
    LeaderId,
    RankId,
    Role,
    RoomKey,
    Span,
    TransferId,
)
from segue.kv.layout.content import Content
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import PoolSpec
from segue.kv.limits import Limits
from segue.kv.protocol import events, messages
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import Destination, Drained, Gone, Moved
from segue.kv.protocol.room_ranks import DpRanks, PrefillInstance
from segue_lab.sim.sim_engine import lineage_spec

PROMPT = 10
ROOM = RoomKey(7)
#: What fields have unless a case is about them.
USUAL = {"rank": 0, "source": 0, "target": 0, "final": False}
ERRORS = {
    "left": AbortedByClient("the client left").info,
    "broke": TransferFailed("it broke").info,
    "full": OutOfCapacity("others need the pages").info,
    "cut": PeerLost("cut").info,
    "begun": TransferFailed("it broke", origin="elsewhere", phase="COMPUTING").info,
    "said": TransferFailed("it broke", origin="far away", phase="TRANSFERRING", room=1, elapsed_s=3.0).info,
}
STRUCTS: dict[str, Any] = {
    t.__name__: t for t in (*get_args(events.Event), *get_args(messages.HandoffMessage))
}
MESSAGES = {t.__name__ for t in get_args(messages.HandoffMessage)}
OPTIONS = {"dp": DpRanks.__struct_fields__, "limits": Limits.__struct_fields__}


def leader(name: str) -> LeaderId:
    """`p2`: DP rank 2 of the incarnation pppp…; `p?`: its rank is not known."""
    return LeaderId(Incarnation(name[0] * 32), OPEN_RANK if name[1:] == "?" else int(name[1:] or 0))


def name(who: LeaderId) -> str:
    return who.incarnation[0] + ("?" if who.is_open else str(who.dp_rank or ""))


def named(text: str) -> str:
    """Leaders in a text of production by their names here."""
    return re.sub(r"\b([a-z])\1{7} dp(\d+|\?)", lambda found: name(leader(found[1] + found[2])), text)


def value(field: str, text: str) -> Any:
    """A word of a script as the value of this field."""
    if text == "null":
        return None
    if field in ("prefill", "decode", "leader", "peer"):
        return leader(text)
    if field == "partner":
        who, _, rank = text.partition(":")
        return RankId(leader(who), int(rank or 0))
    if field == "error":
        code, _, words = text.partition(" ")
        known = ERRORS.get(text)
        return known or type(ErrorInfo(code=ErrorCode(code), text="").exception())(words or "why").info
    if field == "span":
        return Span(*(int(part) for part in text.split("-")))
    if field == "pages":
        return [int(page) for page in text.split(",") if page]
    if field in ("content", "claim"):
        return (text[:1] * int(text[2:]) if text[1:2] == "*" else text).encode()
    if field.endswith("_s") and field in ("budget_s", "retain_s", "wire_s", "unbound_s"):
        return float(text)
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text


@dataclass
class Node:
    """An exchange, and what its ranks were asked and have not answered."""

    exchange: Exchange
    #: of prefill's and of decode's first rank
    pools: tuple[PoolSpec, PoolSpec]
    plan: Any
    late_grants: bool
    writes: list[Any] = field(default_factory=list)
    sums: list[events.ComputeChecksum] = field(default_factory=list)
    fences: list[events.Fence] = field(default_factory=list)
    fenced: list[events.Fence] = field(default_factory=list)
    epochs: set[tuple[int, int]] = field(default_factory=set)
    granted: dict[tuple[int, int], TransferId] = field(default_factory=dict)
    silent: set[TransferId] = field(default_factory=set)
    phases: dict[RoomKey, list[KVPoll]] = field(default_factory=dict)
    ends: dict[RoomKey, events.Phase] = field(default_factory=dict)
    releases: Counter[RoomKey] = field(default_factory=Counter)
    heard: deque[tuple[LeaderId, Any]] = field(default_factory=deque)

    @property
    def prefill(self) -> bool:
        return self.exchange.local.role is Role.PREFILL


class Desk:
    """One run of a case, or the begin of a test in Python: `script` is carried out."""

    def __init__(self, script: str = "") -> None:
        self.nodes: dict[str, Node] = {}
        self.now = 0.0
        self.attempt = 0
        self.log: list[str] = []
        self.errors: list[ErrorInfo] = []
        for command in script.splitlines():
            self.do(command)

    # ---- commands --------------------------------------------------------------------------------

    def do(self, command: str) -> list[str]:
        """Carry out one line of a script; returns its log."""
        log: list[str] = []
        row = re.search(r"(\d+)\.\.(\d+)", command)
        for number in range(int(row[1]), int(row[2]) + 1) if row else [0]:
            for part in (command.replace(row[0], str(number)) if row else command).split("; "):
                self.log = []
                self.one(shlex.split(part))
                log += self.log
        return log

    def one(self, words: list[str]) -> None:
        if words[0] == "at":
            self.now = float(words[1])
            words = words[2:]
        if words[:1] == ["new"]:
            self.new(words[1:])
        elif words:
            who = words.pop(0) if words[0] in self.nodes and words[1] != "says" else None
            if words[1:2] == ["says"]:
                to = next(n for at, n in self.nodes.items() if n.prefill != (words[0][0] == "p"))
                self.tell(to, events.Received(leader(words[0]), self.made(to, words[2], words[3:], words[0])))
            else:
                self.act(self.nodes[who or next(iter(self.nodes))], words)

    def new(self, words: list[str]) -> None:
        self.__init__()  # type: ignore[misc]
        names = [word for word in words if "=" not in word]
        options = {
            key: value(key, text) for key, _, text in (word.partition("=") for word in words if "=" in word)
        }
        limits, dp = ({k: options.pop(k) for k in OPTIONS[of] if k in options} for of in ("limits", "dp"))
        self.attempt = options.pop("attempt", 0)
        ranks, tokens = options.pop("ranks", "1,1"), str(options.pop("page_tokens", "4,4"))
        counts, sizes = ([int(n) for n in part.split(",")] for part in (ranks, tokens))
        sides = [Side(n).specs(24, t) for n, t in zip(counts, sizes, strict=True)]
        if ranks == "1,1":
            sides = [[pool_spec(24, size)] for size in sizes]
        if slots := options.pop("slots", 0):
            sides = [[lineage_spec(8, 4, slots=slots)]] * 2
        plan, late, up = plan_pair(*sides), options.pop("grants", "") == "late", options.pop("sessions", True)
        mode, transport = ChecksumMode(options.pop("checksum", "off")), options.pop("transport", "fake")
        assert not options, f"unknown options {options}"
        for each in names:
            role = Role.PREFILL if each == "p" else Role.DECODE
            exchange = Exchange(
                role, leader(each), str(role), Limits(**limits), transport, mode, DpRanks(**dp)
            )
            self.nodes[each] = Node(exchange, (sides[0][0], sides[1][0]), plan, late)
        for each, node in self.nodes.items():
            others = [n for n in names if n != each] or (
                ["d", "e", "f"] if node.prefill else ["p", "p1", "p2", "p3"]
            )
            for other in others if up else ():
                self.tell(node, events.PeerUp(leader(other), plan))

    def act(self, node: Node, words: list[str]) -> None:
        verb, *rest = words
        match verb:
            case "show":
                self.log.append("  " + " ".join(f"{what}={self.look(node, what)}" for what in rest))
            case "hears":
                for _ in range(int(rest[0]) if rest else 1):
                    self.tell(node, events.Received(*node.heard.popleft()))
            case "land" | "fenced" | "summed":
                self.answer(node, verb, rest)
            case "instances":
                fields = dict(word.split("=") for word in rest)
                there = frozenset(int(n) for n in fields.pop("ranks", "0,1,2,3").split(","))
                who = leader(fields.pop("of", "p")).incarnation
                dp = DpRanks(**{"size": 4, **{key: value(key, text) for key, text in fields.items()}})
                self.tell(node, events.PrefillInstances({who: PrefillInstance(dp, there)}))
            case _:
                self.tell(node, self.made(node, verb, rest))

    def answer(self, node: Node, verb: str, rest: list[str]) -> None:
        """What the ranks were asked (`of` a hand-off, or with these tags) is answered, in this order."""
        of = [self.transfer(node, {"of": word[3:]}) for word in rest if word.startswith("of=")]
        tags = [int(word) for word in rest if word.isdecimal()] if verb == "land" else []
        asked = {"land": node.writes, "fenced": node.fences, "summed": node.sums}[verb]
        found: list[Any] = [each for each in asked if not of or each.transfer in of]
        if tags:
            found = [each for tag in tags for each in found if each.tag == tag]
        for each in found:
            if verb == "land":
                self.tell(node, events.WriteLanded(each.transfer, each.rank, each.tag, 0.1))
            elif verb == "fenced":
                self.tell(
                    node, events.FenceDone(each.transfer, each.rank, each.partner, "unproven" not in rest)
                )
            else:
                self.tell(node, events.ChecksumReady(each.transfer, each.rank, each.tag, int(rest[0])))

    def look(self, node: Node, what: str) -> Any:
        exchange = node.exchange
        if what.startswith("unproven"):
            over = "another" if what == "unproven_elsewhere" else "fake"
            return ",".join(str(f.rank) for f in exchange.unproven_fences(leader("p"), over)) or "-"
        if what == "with":
            return ",".join(sorted(name(peer) for peer in exchange.peers())) or "-"
        if what in (sizes := exchange.sizes()) or what in (sizes := exchange.counters):
            return sizes[what]
        if what == "phase":
            phase = exchange.phase(self.transfer(node, {}))
            return "-" if phase is None else phase.name
        if what == "known_rooms":
            return len(exchange.rooms.rooms)
        if what == "state":
            return ",".join(machine.state.value for machine in exchange.machines.values()) or "-"
        if what == "open_halves":
            return ",".join(self.plain(node, "key", key) or "7" for key in exchange.open_halves()) or "-"
        return (
            getattr(exchange, what)()
            if what in ("next_deadline", "quarantined_pages")
            else getattr(exchange.rooms, what)
        )

    # ---- events ----------------------------------------------------------------------------------

    def transfer(self, node: Node, given: dict[str, str], peer: str | None = None) -> TransferId:
        """The hand-off that the words `of`, `room`, `attempt`, `generation` and `ordinal` name."""
        who, _, attempt = given.pop("of", "").partition("/")
        peer = who or peer or ("d" if node.prefill else "p")
        number = int(given.pop("attempt", attempt) or self.attempt)
        me, other = leader(given.pop("me", name(node.exchange.local.me))), leader(peer)
        room, *rest = (
            int(given.pop(key, default)) for key, default in (("room", 7), ("generation", 0), ("ordinal", 0))
        )
        return TransferId(room, number, *((me, other) if node.prefill else (other, me)), *rest)

    def fields(self, node: Node, kind: str, transfer: TransferId, prefix: int) -> dict[str, Any]:
        """What a script may leave out."""
        size = node.plan.target_page_tokens
        pages = list(range(prefix // size, -(-PROMPT // size)))
        digest = node.plan.hash(PROMPT, prefix, len(pages)) if kind == "Destination" else 0
        counts = (transfer.room, transfer.generation, transfer.ordinal)
        known: dict[str, dict[str, Any]] = {
            "RefuseRoom": {"error": ERRORS["broke"], "deadline": 60.0},
            "OpenReceiver": {"prefill": transfer.prefill},
            "Publish": {"pages": [1, 2, 3], "prefix_tokens": 0},
            "SendChunk": {"pages": [4, 5, 6]},
            "SendMetadata": {"content": b"7"},
            "PeerDown": {"error": ERRORS["cut"]},
            "WriteLanded": {"seconds": 0.1},
            "FenceDone": {
                "proven": True,
                "partner": RankId(transfer.decode if node.prefill else transfer.prefill),
            },
            "Destination": {
                "epoch": 1 + transfer.attempt + 100 * counts[2] + 1000 * counts[1] + 10_000 * counts[0],
                "budget_s": 60.0,
                "prefix_tokens": prefix,
                "pages": pages,
                "transport": "fake",
                "plan_hash": digest,
            },
            "ChunkPosted": {"source": 0, "target": 0, "sequence": 0, "span": Span(0, PROMPT), "final": True},
            "DeclineRoom": {"prefill": transfer.prefill},
            "Metadata": {"content": b"7"},
            "Failed": {"error": ERRORS["broke"]},
        }
        shared = {
            "transfer": transfer,
            "key": transfer.sent_as if node.prefill else transfer.received_as,
            "rank": 0,
            "tag": 0,
            "prompt_tokens": PROMPT,
            "deadline": self.now + 60.0,
            "claim": b"same",
            "error": ERRORS["left"],
            "plan": node.plan,
            "nbytes": PROMPT * 32,
        }
        return {**shared, **known.get(kind, {})}

    def made(self, node: Node, kind: str, words: list[str], speaker: str | None = None) -> Any:
        struct = STRUCTS[kind]
        given = dict(word.split("=", 1) for word in words if "=" in word)
        own = {key: given.pop(key) for key in struct.__struct_fields__ if key in given}
        transfer, prefix = self.transfer(node, given, speaker), int(given.pop("prefix", 0))
        given |= own
        defaults = self.fields(node, kind, transfer, prefix)
        names = [each for each in struct.__struct_fields__ if each not in ("transfer", "key")]
        given |= zip(names, (word for word in words if "=" not in word), strict=False)
        needed = {each.name for each in msgspec.structs.fields(struct) if each.required} | {"claim"}
        chosen = {
            key: text for key, text in defaults.items() if key in needed & set(struct.__struct_fields__)
        }
        assert given.keys() <= set(names), f"{kind} has no {given.keys() - set(names)}"
        chosen |= {key: value(key, text) for key, text in given.items()}
        if kind == "ChunkPosted" and "nbytes" not in given:
            chosen["nbytes"] = len(chosen["span"]) * 32
        if kind in ("SendChunk", "Publish"):
            chosen["pages"] = tuple(chosen["pages"])
        return struct(**chosen)

    def tell(self, node: Node, event: Any) -> None:
        """Give the exchange an event; log and check what follows."""
        kind, asked = type(event), {events.WriteLanded: node.writes, events.WriteBroken: node.writes}
        answers = {**asked, events.ChecksumReady: node.sums, events.FenceDone: node.fences}
        for each in list(answers.get(kind, ())):
            same = (each.transfer, each.rank) == (event.transfer, event.rank)
            if same and (
                each.partner == event.partner if kind is events.FenceDone else each.tag == event.tag
            ):
                answers[kind].remove(each)
                node.granted.pop((each.rank, each.epoch), None) if kind is events.FenceDone else None
        if kind is events.FenceDone:  # a rank answers when none of its writes is in flight
            node.writes = [w for w in node.writes if (w.transfer, w.rank) != (event.transfer, event.rank)]
        before = node.exchange.sizes()
        try:
            effects = node.exchange.handle(event, self.now)
        except SegueError as error:
            assert (node.exchange.sizes(), node.exchange.decided) == (before, []), (
                "refused, and something has changed"
            )
            self.log.append(f"  ! {type(error).__name__}{'?' * error.retryable}: {named(str(error))}")
            effects = []
        else:
            if isinstance(event, events.ExpectRoom | events.OpenReceiver) and node.releases[event.key]:
                del node.phases[event.key], node.releases[event.key]  # it was forgotten, and is another one
        for effect in effects:
            if not isinstance(
                effect, events.HandoffPhase | events.HandoffReleased | events.HandoffQuarantined
            ):
                self.log.append("  " + self.said(node, effect))
        for effect in effects:
            self.note(node, effect)
        node.exchange.check_integrity()

    def note(self, node: Node, effect: events.Effect) -> None:
        match effect:
            case events.PostWrite() | events.Relay():
                assert effect.transfer not in node.silent, "written after it was said that nothing is"
                node.writes.append(effect)
            case events.ComputeChecksum():
                node.sums.append(effect)
            case events.Fence():
                node.fences.append(effect)
                node.fenced.append(effect)
            case events.Grant():
                assert (effect.rank, effect.epoch) not in node.epochs, "an epoch was used twice"
                node.epochs.add((effect.rank, effect.epoch))
                node.granted[effect.rank, effect.epoch] = effect.transfer
                if not node.late_grants:
                    self.tell(node, events.Granted(effect.transfer, effect.rank))
            case events.Send(peer=peer, message=message):
                if isinstance(message, Destination):
                    granted = {
                        t for t in node.granted.values() if t.received_as == message.transfer.received_as
                    }
                    assert granted == {message.transfer}, "the pages were published twice at once"
                if isinstance(message, Gone | Moved | Drained):
                    writing = any(write.transfer == message.transfer for write in node.writes)
                    assert not (writing and node.prefill), (
                        f"{type(message).__name__} was said while writes were in flight"
                    )
                    node.silent.add(message.transfer)
                if (other := self.nodes.get(name(peer))) is not None:
                    other.heard.append((node.exchange.local.me, message))
            case events.Phase(key=key, phase=phase):
                before = node.phases.setdefault(key, [])
                assert not before or not before[-1].terminal, "a phase after the last one"
                assert not before or phase > before[-1] or phase is KVPoll.FAILED, "phases go back"
                before.append(phase)
                node.ends[key] = effect
            case events.Release(key=key):
                assert node.phases[key][-1].terminal, "released before its end"
                node.releases[key] += 1
                assert node.releases[key] == 1, "released twice"

    def rest(self) -> None:
        """All that is open ends and is answered, and time passes: no table keeps anything."""
        for node in self.nodes.values():
            for key in node.exchange.open_halves():
                self.tell(node, events.EndRoom(key, ERRORS["left"]))
            while node.sums:
                self.tell(
                    node, events.ChecksumReady(node.sums[0].transfer, node.sums[0].rank, node.sums[0].tag, 1)
                )
            node.writes.clear()
            for each in node.fenced:
                self.tell(node, events.FenceDone(each.transfer, each.rank, each.partner, True))
            for _ in range(2):  # what has waited in vain is remembered for a while
                self.now += 1e6
                self.tell(node, events.Tick())
            left = {key: count for key, count in node.exchange.sizes().items() if count and key != "peers"}
            assert not left, f"it keeps {left}"
            assert all(node.releases[key] == 1 for key in node.phases), "pages are not back"

    # ---- the log -----------------------------------------------------------------------------------

    def said(self, node: Node, effect: Any, peer: str = "") -> str:
        """An effect, or a message to `peer`, in words: its name, and the fields that are not as usual."""
        if isinstance(effect, events.Send):
            return f"> {name(effect.peer)} {self.said(node, effect.message, name(effect.peer))}"
        words = [type(effect).__name__]
        for each in msgspec.structs.fields(type(effect)):
            given = getattr(effect, each.name)
            if given != USUAL.get(each.name, each.default) and each.name != "plan_hash":
                text = self.plain(node, each.name, given, peer)
                bare = each.name in ("phase", "error", "transfer", "key")
                words += (
                    [text if bare else each.name if given is True else f"{each.name}={text}"] if text else []
                )
        return " ".join(words)

    def plain(self, node: Node, key: str, given: Any, peer: str = "") -> str:
        if isinstance(given, TransferId):
            words = [self.plain(node, "key", given.sent_as)] if given.sent_as != ROOM else []
            other = name(given.decode if node.prefill else given.prefill)
            if other != (peer or ("d" if node.prefill else "p")):
                words.append(f"of={other}/{given.attempt}")
            elif given.attempt != self.attempt:
                words.append(f"attempt={given.attempt}" if peer else f"of={other}/{given.attempt}")
            return " ".join(words)
        if isinstance(given, RoomKey):
            usual = ROOM if node.prefill else msgspec.structs.replace(ROOM, attempt=self.attempt)
            parts = zip(
                given.__struct_fields__,
                msgspec.structs.astuple(given),
                msgspec.structs.astuple(usual),
                strict=True,
            )
            return " ".join(f"{part}={number}" for part, number, known in parts if number != known)
        if isinstance(given, ErrorInfo):
            return self.error(given)
        if isinstance(given, LeaderId):
            return name(given)
        if isinstance(given, RankId):
            return f"{name(given.leader)}:{given.rank}"
        if isinstance(given, KVPoll):
            return given.name
        if key == "blocks":
            rows = [row for block in given for row in block.ranges()]
            copied = f"{sum(row[2] for row in rows)}B"
            if node.pools[0].slots:  # a state has no page
                return copied
            ends = [",".join(map(str, sorted(set(self.pages(node, rows, side))))) for side in (0, 1)]
            return f"{copied}:{ends[0]}>{ends[1]}"
        if isinstance(given, Content):
            return self.content(node, given)
        if key == "epoch":
            return str(given & 0xFFFFFFFF)
        if isinstance(given, Span):
            return f"{given.start}-{given.end}"
        if isinstance(given, float):
            return f"{given:g}"
        if isinstance(given, list | tuple):
            return ",".join(map(str, given)) or "none"
        return given.decode() if isinstance(given, bytes) else str(given)

    def content(self, node: Node, given: Content) -> str:
        """What is hashed of our pool: bytes, pages, and the layers where they are not all."""
        side = 0 if node.prefill else 1
        spec, rows = node.pools[side], [(int(at), int(at), int(end - at)) for at, end in given.ranges()]
        text = f"{sum(row[2] for row in rows)}B"
        if spec.slots:
            return text + "+state" * (given.state is not None)
        layers = sorted({plane.offset * spec.layer_count // spec.nbytes for plane in given.planes})
        text += ":" + ",".join(map(str, sorted(set(self.pages(node, rows, side)))))
        return text + ("@" + ",".join(map(str, layers)) if len(layers) < spec.layer_count else "")

    def pages(self, node: Node, ranges: list[tuple[int, int, int]], side: int) -> Iterator[int]:
        """The pages that a copy reads (0) or writes (1); the pools here keep one region for each layer's K
        and V."""
        spec = node.pools[side]
        size = spec.page_tokens * spec.shape.item_bytes
        for row in ranges:
            yield from (
                at % (spec.pages * size) // size
                for at in range(row[side], row[side] + row[2], spec.shape.item_bytes)
            )

    def error(self, info: ErrorInfo) -> str:
        """A record in whole when it is seen first, else its code alone: it has come unchanged."""
        if info in self.errors:
            return info.code
        self.errors.append(info)
        where = [info.origin, info.phase, f"peer={info.peer}" * bool(info.peer)]
        where += [f"room={info.room}" * (info.room != 7), f"{info.elapsed_s:g}s" * bool(info.elapsed_s)]
        return named(f"{info.code}{'?' * info.retryable} '{info.text}' [{' '.join(filter(None, where))}]")
