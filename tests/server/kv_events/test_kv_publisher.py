"""KV events over ZMQ, read as a router reads those of vLLM."""

from __future__ import annotations

import logging
import os
import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from ports import HeldPort
from segue.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, page_hashes
from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree
from segue.engine.prefix_journal import PrefixJournal
from segue.kv.errors import ConfigError
from segue.server.kv_events import kv_publisher, zmtp
from segue.server.kv_events.kv_publisher import END, KVPublisher
from segue.server.settings.kv_events_config import KVEventsConfig

zmq = pytest.importorskip("zmq", reason="no pyzmq: pip install 'segue[dev]'")


# The fields and options of vllm/distributed/kv_events.py, v0.28.0, as test data.
class VBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[VStored | VRemoved | VCleared]
    data_parallel_rank: int | None = None


class VStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class VRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class VCleared(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    pass


#: The number of the first batch of a process that begins 5 s after 1970.
FIRST = 5000
EVENTS: list[KVEvent] = [
    BlockStored([2**64 - 1, 5], None, [1, 2, 3, 128255], 2),
    BlockStored([6], 5, [4, 5], 2),
    BlockRemoved([6]),
    AllBlocksCleared(),
]


def heard_once(sub: zmq.Socket[bytes], last: int) -> tuple[bytes, int, bytes]:
    """The next message with another number than the `last` one."""
    while True:
        topic, number, payload = sub.recv_multipart()
        if (found := int.from_bytes(number, "big")) != last:
            return topic, found, payload


class Subscriber:
    """A router: a SUB socket, and a REQ socket for what it missed."""

    def __init__(self, port: int, replay: int, topic: str) -> None:
        self.last = -1
        self.context = zmq.Context()
        self.sub, self.req = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for one in (self.sub, self.req):
            one.setsockopt(zmq.RCVTIMEO, 60_000)
            one.setsockopt(zmq.LINGER, 0)
        self.sub.subscribe(topic)
        self.sub.connect(f"tcp://127.0.0.1:{port}")
        self.req.connect(f"tcp://127.0.0.1:{replay}")

    def until_beat(self) -> None:
        """Until it hears a batch without events: the publisher knows it."""
        while self.next()[2].events:
            pass

    def next(self) -> tuple[bytes, int, VBatch]:
        """The next one that is no repeat."""
        topic, number, payload = heard_once(self.sub, self.last)
        self.last = number
        return topic, number, msgspec.msgpack.decode(payload, type=VBatch)

    def missed(self, number: int) -> list[tuple[int, VBatch]]:
        self.req.send_multipart((b"", number.to_bytes(8, "big")))
        found = []
        while (frames := self.req.recv_multipart())[1] != END:
            batch = msgspec.msgpack.decode(frames[2], type=VBatch)
            found.append((int.from_bytes(frames[1], "big"), batch))
        return found


@pytest.fixture
def held() -> tuple[HeldPort, HeldPort]:
    return HeldPort(), HeldPort()


@pytest.fixture
def ports(held: tuple[HeldPort, HeldPort]) -> tuple[int, int]:
    return held[0].port, held[1].port


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Batches without events soon; a test may say when they end, but for a repeat."""

    def every(seconds: float) -> None:
        monkeypatch.setattr(kv_publisher, "BEAT_S", seconds)

    every(0.01)
    return every


@contextmanager
def publishing(
    ports: tuple[int, int], *, clock: Callable[[], float] = lambda: 5.0, dp_rank: int = 0, **config: Any
) -> Iterator[KVPublisher]:
    """A publisher at both ports."""
    settings = {"kv_events_port": ports[0], "kv_events_replay_port": ports[1], "kv_events_topic": "kv"}
    publisher = KVPublisher(KVEventsConfig(**settings | config), dp_rank, clock)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(ports: tuple[int, int], count: int = 1) -> Iterator[list[Subscriber]]:
    """So many subscribers."""
    made = [Subscriber(*ports, "kv") for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.context.destroy()


@pytest.fixture
def pair(ports: tuple[int, int], fast: Callable[[float], None]) -> Iterator[tuple[KVPublisher, Subscriber]]:
    config = {"kv_events_topic": "kv@x@tiny", "kv_events_host": "localhost"}
    with publishing(ports, **config) as publisher, subscribed(ports) as [subscriber]:
        subscriber.until_beat()
        fast(3600.0)
        yield publisher, subscriber


def test_a_subscriber_with_the_structs_of_vllm_reads_our_events(
    pair: tuple[KVPublisher, Subscriber],
) -> None:
    publisher, subscriber = pair
    publisher.publish(EVENTS)
    topic, number, batch = subscriber.next()
    assert topic == b"kv@x@tiny"
    assert batch.data_parallel_rank == 0
    assert batch.events == [
        VStored([2**64 - 1, 5], None, [1, 2, 3, 128255], 2, None, "GPU", None),
        VStored([6], 5, [4, 5], 2, None, "GPU", None),
        VRemoved([6], "GPU"),
        VCleared(),
    ]
    publisher.publish(EVENTS[2:3])
    assert subscriber.next()[1] == number + 1


def test_what_was_missed_can_be_asked_for_as_long_as_it_is_kept(
    pair: tuple[KVPublisher, Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = pair
    publisher.publish(EVENTS[2:3])
    assert subscriber.next()[2].events == [VRemoved([6], "GPU")]
    everything = subscriber.missed(0)
    assert [number for number, _ in everything] == list(range(FIRST, FIRST + len(everything)))
    assert everything[0][1].events == [VCleared()], "a new process begins with nothing"
    assert subscriber.missed(FIRST + len(everything) - 1) == everything[-1:]
    assert subscriber.missed(2**63) == []
    monkeypatch.setattr(kv_publisher, "KEPT_BATCHES", 2)
    publisher.publish(EVENTS[:1])
    subscriber.next()
    last = FIRST + len(everything)
    assert [number for number, _ in subscriber.missed(0)] == [last - 1, last]
    subscriber.req.send_multipart((b"nonsense",))
    assert len(subscriber.missed(0)) == 2


def test_who_followed_an_earlier_process_sees_a_gap_and_hears_that_nothing_is_there(
    ports: tuple[int, int],
) -> None:
    """The numbers of the next process at an address are higher: subscribers drop lower ones."""
    with subscribed(ports) as [subscriber]:
        with publishing(ports, clock=lambda: 100.0) as earlier:
            subscriber.until_beat()
            earlier.publish(EVENTS[:1])
            heard = subscriber.next()
        with publishing(ports, clock=lambda: 160.0):
            while subscriber.next()[1] < 160_000:  # by itself it hears of the next process
                pass
            missed = subscriber.missed(heard[1] + 1)
            assert (missed[0][0], missed[0][1].events) == (160_000, [VCleared()])


def test_who_subscribes_late_hears_that_there_was_something_and_the_others_nothing_new(
    ports: tuple[int, int],
) -> None:
    with publishing(ports) as publisher, subscribed(ports) as [first]:
        first.until_beat()
        publisher.publish(EVENTS[:1])
        stored = first.next()
        for _ in range(3):
            with subscribed(ports) as [late]:
                # However often it is said, no kept batch makes room for that.
                assert late.next() == (b"kv", stored[1] + 1, VBatch(5.0, [], 0))
                assert late.missed(stored[1])[0] == stored[1:], "what it missed is there"
        assert first.next()[1:] == (stored[1] + 1, VBatch(5.0, [], 0))
        publisher.publish(EVENTS[1:2])
        assert first.next()[1] == stored[1] + 2


@pytest.mark.slow
def test_a_replay_of_all_that_is_kept_has_its_end_however_late_it_is_read(
    pair: tuple[KVPublisher, Subscriber], ports: tuple[int, int]
) -> None:
    publisher, late = pair
    number = FIRST + len(late.missed(0)) - 1
    payload: list[KVEvent] = [BlockStored([1], None, list(range(1000)), 1000)]
    for _ in range(kv_publisher.KEPT_BATCHES):
        publisher.publish(payload)
        number += 1
    while late.next()[1] < number:
        pass
    for _ in range(2):
        late.req.send_multipart((b"", (0).to_bytes(8, "big")))
        with subscribed(ports) as [other]:
            assert other.missed(2**63) == [], "by then the first one's answer is on its way"
        found = []
        while (frames := late.req.recv_multipart())[1] != END:
            found.append(int.from_bytes(frames[1], "big"))
        assert found == list(range(number + 1 - kv_publisher.KEPT_BATCHES, number + 1))


def test_a_port_that_is_taken_is_one_sentence(ports: tuple[int, int]) -> None:
    config = KVEventsConfig(kv_events_port=ports[0])
    publisher = KVPublisher(config, 0)
    with pytest.raises(ConfigError, match=f"port {ports[0]} .* in use .* --kv-events-port"):
        KVPublisher(config, 0)
    with pytest.raises(ConfigError, match=f"port {ports[0]} .* in use .* --kv-events-replay-port"):
        KVPublisher(KVEventsConfig(kv_events_port=ports[1], kv_events_replay_port=ports[0]), 0)
    publisher.close()
    publisher.close()
    KVPublisher(KVEventsConfig(kv_events_port=ports[1]), 0).close()
    for alone in ({"kv_events_topic": "x"}, {"kv_events_host": "0.0.0.0"}, {"kv_events_replay_port": 5}):
        with pytest.raises(ConfigError, match="need --kv-events-port"):
            KVEventsConfig(**alone)


class Stranger:
    """A subscriber as vLLM's example is one: SUB and REQ sockets, msgpack without our types. `index` has the
    tokens of each block, from the prompt's start on, by its hash."""

    def __init__(self, port: int, replay: int) -> None:
        self.context = zmq.Context()
        self.context.setsockopt(zmq.RCVTIMEO, 60_000)
        self.context.setsockopt(zmq.LINGER, 0)
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "kv")
        self.sub.connect(f"tcp://127.0.0.1:{port}")
        self.replay = f"tcp://127.0.0.1:{replay}"
        self.last, self.index, self.known = -1, dict[int, list[int]](), False

    def lose(self) -> None:
        """One message never arrives."""
        heard_once(self.sub, self.last)

    def hear(self) -> None:
        _, seq, payload = heard_once(self.sub, self.last)
        if 0 <= self.last < seq - 1:
            for missed in range(self.last + 1, seq):
                # A REQ socket takes one answer, and what follows would be in the way of its next question.
                with self.context.socket(zmq.REQ) as replay:
                    replay.connect(self.replay)
                    replay.send(missed.to_bytes(8, "big"))
                    at, found = replay.recv_multipart()
                assert int.from_bytes(at, "big") == missed
                self._process(found)
        self._process(payload)
        self.last = seq

    def _process(self, payload: bytes) -> None:
        _ts, events, *_rank = msgspec.msgpack.decode(payload)
        self.known = self.known or not events
        for event in events:
            match event.pop("type"):
                case "BlockStored":
                    before = self.index[parent] if (parent := event["parent_block_hash"]) is not None else []
                    tokens, size = event["token_ids"], event["block_size"]
                    for end, block in enumerate(event["block_hashes"], 1):
                        self.index[block] = before + tokens[: end * size]
                case "BlockRemoved":
                    for block in event["block_hashes"]:
                        del self.index[block]
                case "AllBlocksCleared":
                    self.index.clear()


def test_a_stranger_that_misses_batches_has_the_index_of_the_prefix_tree(
    ports: tuple[int, int], fast: Callable[[float], None]
) -> None:
    rng = random.Random(3)
    pool = PagePool(24, 4)
    tree = PrefixTree(pool, 4)
    journal = PrefixJournal(tree, 4)
    stranger = Stranger(*ports)
    with publishing(ports) as publisher:
        while not stranger.known:
            stranger.hear()
        fast(3600.0)
        lost = 0
        for number in range(60):
            tokens = [rng.randrange(2) for _ in range(4 * rng.randint(1, 6))]
            tree.evict(max(0, len(tokens) // 4 - pool.free))
            pages = pool.allocate(len(tokens) // 4)
            tree.insert(tokens, pages)
            pool.release(pages)
            if number % 20 == 19:
                tree.clear()
            if not journal.pending:
                continue
            publisher.publish(journal.take())
            if number % 3 and number < 57:
                stranger.lose()
                lost += 1
                continue
            stranger.hear()
            held = [event for event in journal.whole() if isinstance(event, BlockStored)]
            assert stranger.index.keys() == {block for event in held for block in event.block_hashes}
            for block, prompt in stranger.index.items():
                assert list(page_hashes(prompt, 4))[-1] == block
        assert lost > 10
    stranger.context.destroy()


def test_what_is_kept_for_who_missed_it_is_bounded_in_batches_and_in_bytes(
    pair: tuple[KVPublisher, Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = pair

    def kept(tokens: int) -> list[int]:
        """The sizes of what is kept after one more batch."""
        publisher.publish([BlockStored([1], None, [1] * tokens, tokens)])
        subscriber.next()
        events = [event for _, batch in subscriber.missed(0) for event in batch.events]
        return [len(event.token_ids) for event in events if isinstance(event, VStored)]

    with monkeypatch.context() as few:
        few.setattr(kv_publisher, "KEPT_BATCHES", 3)
        assert [kept(tokens) for tokens in (5, 4, 3, 2)][-1] == [4, 3, 2]
    monkeypatch.setattr(kv_publisher, "KEPT_BYTES", 10_000)
    assert kept(4000) == [4, 3, 2, 4000]
    assert kept(4001) == [4, 3, 2, 4000, 4001]
    assert kept(5000) == [4001, 5000]
    assert kept(9000) == [9000]


def test_a_batch_that_found_no_room_leaves_a_gap_that_subscribers_see(
    pair: tuple[KVPublisher, Subscriber], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = pair
    publisher.publish(EVENTS[2:3])
    number = subscriber.next()[1]

    with monkeypatch.context() as full:
        full.setattr(kv_publisher, "MAX_WAITING", 0)  # its thread is behind: an instance waits for nobody
        publisher.publish(EVENTS[:1])
        full.setattr(kv_publisher, "MAX_WAITING", 9)
        full.setattr(kv_publisher, "MAX_WAITING_BYTES", 3)
        publisher.publish(EVENTS[1:2])
    publisher.publish(EVENTS[2:3])
    assert subscriber.next()[1] == number + 3
    assert [kept for kept, _ in subscriber.missed(number)] == [number, number + 3]
    assert caplog.messages == ["event=kv_events_dropped events=1"] * 2


def test_each_dp_rank_has_ports_of_its_own_and_says_which_it_is(ports: tuple[int, int]) -> None:
    port, replay = sorted(ports)
    if replay - port < 4:
        replay = port + 4
    at = {"kv_events_port": port - 3, "kv_events_replay_port": replay - 3}
    with publishing(ports, dp_rank=3, **at), subscribed((port, replay)) as [subscriber]:
        assert subscriber.next()[2].data_parallel_rank == 3
        assert subscriber.missed(0)[0][1].data_parallel_rank == 3


# ---- clients that cost more than they should ----------------------------------------------------------


def zmtp_client(port: int, kind: bytes = b"SUB", address: str = "127.0.0.1") -> socket.socket:
    """A TCP connection that has done ZMTP's handshake."""
    sock = socket.create_connection(("127.0.0.1", port), 60, source_address=(address, 0))
    sock.sendall(zmtp.GREETING + zmtp.ready(kind))
    return sock


def heard_a_batch(sock: socket.socket) -> None:
    """Read until the frame before a batch, its number in 8 bytes, comes after this call."""
    said = b""
    while zmtp.head(8, more=True) not in said:
        piece = sock.recv(2**16)
        assert piece, "it was cut"
        said = said[-1:] + piece


def ended(sock: socket.socket) -> None:
    """Read until the other side has closed the connection."""
    sock.settimeout(60)
    try:
        while sock.recv(2**16):
            pass
    except ConnectionError:
        return


def test_the_ports_are_those_of_loopback_unless_another_address_is_named_which_is_warned_of(
    ports: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    assert KVEventsConfig(kv_events_port=1).kv_events_host == "127.0.0.1"
    config = KVEventsConfig(kv_events_port=ports[0], kv_events_host="0.0.0.0")
    with caplog.at_level(logging.WARNING):
        KVPublisher(config, 0).close()
    assert caplog.messages == [
        f"--kv-events-host 0.0.0.0: every host that can reach port {ports[0]} reads the tokens of all "
        "prompts, without a key"
    ]


def test_silent_connections_take_few_descriptors_and_no_place_of_a_router(
    pair: tuple[KVPublisher, Subscriber], ports: tuple[int, int]
) -> None:
    publisher, subscriber = pair
    before = len(os.listdir("/proc/self/fd"))
    silent = [socket.create_connection(("127.0.0.1", port), 60) for port in ports for _ in range(200)]
    try:
        for sock in (silent[0], silent[200]):
            ended(sock)  # the oldest of each port makes room
        publisher.publish(EVENTS[:1])
        assert subscriber.next()[2].events
        with subscribed(ports) as [late]:
            assert late.missed(0)[0][1].events == [VCleared()]
        ours = len(os.listdir("/proc/self/fd")) - before - len(silent)
        assert ours < 2 * kv_publisher.MAX_PENDING + 20, "of 400 connections"
    finally:
        for sock in silent:
            sock.close()


def test_a_handshake_that_does_not_end_has_a_deadline(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "HANDSHAKE_S", 0.05)
    with publishing(ports), socket.create_connection(("127.0.0.1", ports[0]), 60) as sock:
        sock.sendall(zmtp.GREETING[:30])
        ended(sock)


@pytest.mark.parametrize("which", [0, 1], ids=["PUB", "ROUTER"])
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        zmtp.GREETING[:10] + b"\x01" + bytes(53),
        zmtp.GREETING.replace(b"NULL", b"CURV") + zmtp.ready(b"SUB"),
        zmtp.GREETING + zmtp.ready(b"PUSH"),
        zmtp.GREETING + zmtp.command(b"ERROR"),
        zmtp.GREETING + b"\x04\x00",
        zmtp.GREETING + b"\x00\x01\x01",
        zmtp.GREETING + b"\x02" + (2**40).to_bytes(8, "big"),
        zmtp.GREETING + b"\x06" + (2**63).to_bytes(8, "big"),
        zmtp.GREETING + zmtp.ready(b"DEALER") + zmtp.ready(b"SUB") + b"\x01\x00" * 5,
    ],
    ids=["http", "old", "curve", "push", "no ready", "empty", "early", "large", "larger", "many frames"],
)
def test_what_is_no_zmq_client_is_cut_and_nobody_else_notices(
    pair: tuple[KVPublisher, Subscriber], ports: tuple[int, int], which: int, said: bytes
) -> None:
    publisher, subscriber = pair
    with socket.create_connection(("127.0.0.1", ports[which]), 60) as sock:
        sock.sendall(said)
        ended(sock)
    publisher.publish(EVENTS[:1])
    assert subscriber.next()[2].events
    assert subscriber.missed(0)


def test_clients_that_ask_for_nothing_make_room_and_beyond_the_limit_newcomers_are_refused(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_CLIENTS", 4)
    idle = list[socket.socket]()
    with publishing(ports) as publisher, subscribed(ports) as [first]:
        first.until_beat()
        assert first.missed(0)
        for port, kind in ((ports[0], b"SUB"), (ports[1], b"REQ")):
            for _ in range(5):
                idle.append(zmtp_client(port, kind))
                assert idle[-1].recv(100)
            for sock in idle[-5:-3]:
                ended(sock)
        with subscribed(ports, 3) as others:
            for other in others:
                other.until_beat()
            with zmtp_client(ports[0]) as refused:
                ended(refused)
            publisher.publish(EVENTS[:1])
            for one in (first, *others):
                while not one.next()[2].events:
                    pass
    for sock in idle:
        sock.close()


def test_subscribers_of_one_address_do_not_keep_those_of_another_one_out(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_CLIENTS", 4)
    monkeypatch.setattr(kv_publisher, "BEAT_S", 0.02)
    here = list[socket.socket]()
    with publishing(ports):
        for address in ("127.0.1.1",) * 4 + ("127.0.1.2", "127.0.1.3"):
            here.append(zmtp_client(ports[0], address=address))
            here[-1].sendall(b"\x00\x01\x01")
            heard_a_batch(here[-1])
        for sock in here[:2]:
            ended(sock)
        with zmtp_client(ports[0], address="127.0.1.1") as refused:
            ended(refused)
        for sock in here[2:]:
            heard_a_batch(sock)
    for sock in here:
        sock.close()


@pytest.mark.parametrize(("rate", "heard"), [(0.001, 63), (6400.0, 1000)])
def test_a_client_that_says_much_is_read_at_a_rate(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch, rate: float, heard: int
) -> None:
    """One that subscribed and unsubscribed without end occupied half a core of the instance."""
    monkeypatch.setattr(kv_publisher, "HEARD_FRAMES_S", rate)
    monkeypatch.setattr(kv_publisher, "BEAT_S", 0.02)
    pong = zmtp.command(b"PONG", b"abcd")
    with publishing(ports), zmtp_client(ports[0]) as client, zmtp_client(ports[0]) as other:
        client.sendall(zmtp.command(b"PING", b"\0\1abcd") * 1000)
        other.sendall(b"\x00\x01\x01")
        heard_a_batch(other)
        said = b""
        while said.count(pong) < heard:
            piece = client.recv(65536)
            assert piece
            said += piece
        heard_a_batch(other)
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)


@pytest.mark.slow
def test_a_subscriber_that_reads_nothing_holds_no_batches_and_is_cut(
    pair: tuple[KVPublisher, Subscriber],
    ports: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher, honest = pair
    monkeypatch.setattr(kv_publisher, "STALL_S", 0.2)
    cut, hearing = threading.Event(), logging.Handler(logging.DEBUG)
    monkeypatch.setattr(
        hearing, "emit", lambda record: cut.set() if "client_cut" in record.getMessage() else None
    )
    monkeypatch.setattr(kv_publisher.log, "handlers", [hearing])
    caplog.set_level(logging.DEBUG, kv_publisher.log.name)
    stalled = zmtp_client(ports[0])
    try:
        stalled.sendall(b"\x00\x01\x01")
        before, tokens = rss(), list(range(2**16, 2**16 + 80_000))
        for number in range(400):
            publisher.publish([BlockStored([number], None, tokens, 80_000)])
            honest.last = heard_once(honest.sub, honest.last)[1]
        assert rss() - before < kv_publisher.KEPT_BYTES + 32 * 2**20, "160 MB were sent"
        assert cut.wait(60), "reading now would save it"
        ended(stalled)
    finally:
        stalled.close()


@pytest.mark.slow
def test_a_replay_is_written_as_it_is_read_and_an_honest_asker_has_its_turn(
    pair: tuple[KVPublisher, Subscriber], ports: tuple[int, int]
) -> None:
    publisher, honest = pair
    for number in range(100):
        publisher.publish([BlockStored([number], None, list(range(2**16, 2**16 + 100_000)), 100_000)])
        honest.next()
    before = rss()
    greedy = [zmtp_client(ports[1], b"REQ") for _ in range(20)]
    question = b"\x01\x00" + b"\x00\x08" + bytes(8)
    try:
        for sock in greedy:
            sock.sendall(question * 150)
        for _ in range(3):
            assert len(honest.missed(honest.last)) == 1
        assert rss() - before < 30 * 2**20, "20 of 50 MB, 150 times each, were asked for"
        publisher.close()  # which waits for none of them
    finally:
        for sock in greedy:
            sock.close()


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_replays_of_all_askers_together_have_a_rate(
    pair: tuple[KVPublisher, Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that asks for the same again and again reads as much as everybody together may: 20 KB in the time
    of this test, whatever that is, at a rate of one byte a second."""
    publisher, subscriber = pair
    for _ in range(5):
        publisher.publish([BlockStored([1], None, list(range(2**16, 2**16 + 10_000)), 10_000)])
        subscriber.next()
    monkeypatch.setattr(kv_publisher, "REPLAY_BYTES_S", 1)
    for _ in range(20):
        subscriber.req.send_multipart((b"", bytes(8)))
    heard = 0
    while subscriber.req.poll(500):
        heard += sum(map(len, subscriber.req.recv_multipart()))
    assert 0 < heard <= 2 * kv_publisher.CHUNK


def test_many_events_are_several_batches_of_a_size_that_is_kept(
    pair: tuple[KVPublisher, Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = pair
    monkeypatch.setattr(kv_publisher, "BATCH_TOKENS", 4)
    publisher.publish(EVENTS)
    assert [subscriber.next()[2].events for _ in range(2)] == [
        [VStored([2**64 - 1, 5], None, [1, 2, 3, 128255], 2, None, "GPU", None)],
        [VStored([6], 5, [4, 5], 2, None, "GPU", None), VRemoved([6], "GPU"), VCleared()],
    ]


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_a_client_with_heartbeats_stays(ports: tuple[int, int], kind: int) -> None:
    """libzmq sends a PING after each interval, and ends the connection without a PONG."""
    context = zmq.Context()
    with publishing(ports), context.socket(kind) as sock:
        sock.setsockopt(zmq.HEARTBEAT_IVL, 20)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://127.0.0.1:{ports[1]}")
        sock.send_multipart(([] if kind == zmq.REQ else [b""]) + [(2**63).to_bytes(8, "big")])
        assert sock.poll(60_000)
        assert sock.recv_multipart()[-2:] == [END, b""]
        assert not sock.poll(200), "PINGs are answered as such"
    context.destroy()
