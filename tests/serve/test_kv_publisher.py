"""KV events over ZMQ, read as a router reads those of vLLM."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from segue.core.errors import ConfigError
from segue.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, page_hashes
from segue.core.kv_events_config import KVEventsConfig
from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree
from segue.engine.prefix_journal import PrefixJournal
from segue.serve import kv_publisher
from segue.serve.kv_publisher import END, KVPublisher

zmq = pytest.importorskip("zmq", reason="no pyzmq: pip install 'segue[zmq]'")


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
def ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for sock in (one, two):
            sock.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Batches without events soon; a test may say when they end, but for a repeat."""

    def every(seconds: float) -> None:
        monkeypatch.setattr(kv_publisher, "BEAT_S", seconds)

    every(0.01)
    return every


@pytest.fixture
def pair(ports: tuple[int, int], fast: Callable[[float], None]) -> Iterator[tuple[KVPublisher, Subscriber]]:
    port, replay = ports
    config = KVEventsConfig(kv_events_port=port, kv_events_replay_port=replay, kv_events_topic="kv@x@tiny")
    publisher = KVPublisher(config, "localhost", 0, lambda: 5.0)
    subscriber = Subscriber(port, replay, "kv@")
    subscriber.until_beat()
    fast(3600.0)
    yield publisher, subscriber
    publisher.close()
    subscriber.context.destroy()


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
    config = KVEventsConfig(kv_events_port=ports[0], kv_events_replay_port=ports[1], kv_events_topic="kv")
    earlier = KVPublisher(config, "127.0.0.1", 0, lambda: 100.0)
    subscriber = Subscriber(*ports, "kv")
    try:
        subscriber.until_beat()
        earlier.publish(EVENTS[:1])
        heard = subscriber.next()
        earlier.close()
        later = KVPublisher(config, "127.0.0.1", 0, lambda: 160.0)
        try:
            while subscriber.next()[1] < 160_000:  # by itself it hears of the next process
                pass
            missed = subscriber.missed(heard[1] + 1)
            assert (missed[0][0], missed[0][1].events) == (160_000, [VCleared()])
        finally:
            later.close()
    finally:
        earlier.close()
        subscriber.context.destroy()


def test_who_subscribes_late_hears_that_there_was_something_and_the_others_nothing_new(
    ports: tuple[int, int],
) -> None:
    config = KVEventsConfig(kv_events_port=ports[0], kv_events_replay_port=ports[1], kv_events_topic="kv")
    publisher, first = KVPublisher(config, "127.0.0.1", 0, lambda: 5.0), Subscriber(*ports, "kv")
    try:
        first.until_beat()
        publisher.publish(EVENTS[:1])
        stored = first.next()
        for _ in range(3):
            late = Subscriber(*ports, "kv")
            try:
                # However often it is said, no kept batch makes room for that.
                assert late.next() == (b"kv", stored[1] + 1, VBatch(5.0, [], 0))
                assert late.missed(stored[1])[0] == stored[1:], "what it missed is there"
            finally:
                late.context.destroy()
        assert first.next()[1:] == (stored[1] + 1, VBatch(5.0, [], 0))
        publisher.publish(EVENTS[1:2])
        assert first.next()[1] == stored[1] + 2
    finally:
        publisher.close()
        first.context.destroy()


def test_a_replay_of_all_that_is_kept_has_its_end_however_late_it_is_read(
    pair: tuple[KVPublisher, Subscriber], ports: tuple[int, int]
) -> None:
    publisher, late = pair
    late.missed(0)  # its thread has kept the batch that was heard, and keeps nothing more
    for number in range(kv_publisher.KEPT_BATCHES):
        publisher._keep(number, b"x" * 3000)
    for _ in range(2):
        late.req.send_multipart((b"", (0).to_bytes(8, "big")))
        other = Subscriber(*ports, "kv@")
        try:
            assert other.missed(2**63) == [], "by then the first one's answer is on its way"
        finally:
            other.context.destroy()
        found = []
        while (frames := late.req.recv_multipart())[1] != END:
            found.append(int.from_bytes(frames[1], "big"))
        assert found == list(range(kv_publisher.KEPT_BATCHES))


def test_a_port_that_is_taken_is_one_sentence(ports: tuple[int, int]) -> None:
    config = KVEventsConfig(kv_events_port=ports[0])
    publisher = KVPublisher(config, "127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"--kv-events-port {ports[0]}"):
        KVPublisher(config, "127.0.0.1", 0)
    publisher.close()
    publisher.close()
    with pytest.raises(ConfigError, match="need --kv-events-port"):
        KVEventsConfig(kv_events_topic="x")


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
    config = KVEventsConfig(kv_events_port=ports[0], kv_events_replay_port=ports[1], kv_events_topic="kv")
    publisher, stranger = KVPublisher(config, "127.0.0.1", 0), Stranger(*ports)
    try:
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
    finally:
        stranger.context.destroy()
        publisher.close()


def test_what_is_kept_for_who_missed_it_is_bounded_in_batches_and_in_bytes(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "KEPT_BYTES", 10)
    monkeypatch.setattr(kv_publisher, "KEPT_BATCHES", 3)
    publisher = KVPublisher(KVEventsConfig(kv_events_port=ports[0]), "127.0.0.1", 0)
    publisher.close()
    publisher._kept.clear()
    publisher._kept_bytes = 0
    for number, payload in enumerate((b"xxxx", b"yyy", b"zzz", b"w", b"v")):
        publisher._keep(number, payload)
    assert [number for number, _ in publisher._kept] == [2, 3, 4]
    publisher._keep(5, b"u" * 9)
    assert [number for number, _ in publisher._kept] == [4, 5]
    publisher._keep(6, b"t" * 11)
    assert (list(publisher._kept), publisher._kept_bytes) == ([], 0)


def test_a_batch_that_found_no_room_leaves_a_gap_that_subscribers_see(
    pair: tuple[KVPublisher, Subscriber], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = pair
    publisher.publish(EVENTS[2:3])
    number = subscriber.next()[1]

    class Full:
        """The socket to the publisher's thread, which is behind."""

        def send_multipart(self, frames: tuple[bytes, bytes], flags: int) -> None:
            assert flags == zmq.NOBLOCK, "an instance does not wait for its subscribers"
            raise zmq.Again

    with monkeypatch.context() as behind:
        behind.setattr(publisher, "_outer", Full())
        publisher.publish(EVENTS[:1])
        publisher.publish(EVENTS[1:2])
    publisher.publish(EVENTS[2:3])
    assert subscriber.next()[1] == number + 3
    assert [kept for kept, _ in subscriber.missed(number)] == [number, number + 3]
    assert caplog.messages == ["event=kv_events_dropped events=1"] * 2


def test_each_dp_rank_has_ports_of_its_own_and_says_which_it_is(ports: tuple[int, int]) -> None:
    port, replay = sorted(ports)
    if replay - port < 4:
        replay = port + 4
    config = KVEventsConfig(kv_events_port=port - 3, kv_events_replay_port=replay - 3, kv_events_topic="kv")
    publisher, subscriber = KVPublisher(config, "127.0.0.1", 3), Subscriber(port, replay, "kv")
    try:
        assert subscriber.next()[2].data_parallel_rank == 3
        assert subscriber.missed(0)[0][1].data_parallel_rank == 3
    finally:
        publisher.close()
        subscriber.context.destroy()
