"""Incidents of disaggregated serving, by their numbers in SGLang's tracker, through its queues and pools."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

pytest.importorskip("sglang", exc_type=ImportError)

import requests
import torch
from sglang.srt.managers.disagg_service import start_disagg_service
from sglang.srt.managers.schedule_batch import Req, release_req
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.runtime_context import get_disagg
from sglang_queues import PAGE, TOKENS, Decode, Prefill, publish_configuration, request, turns

from segue.engine.models.model_store import DEFAULT_MODEL, resolve_model
from segue.integrations.sglang import sglang_plugin
from segue.integrations.sglang.sglang_handoffs import ReceiverHalf, SenderHalf
from segue.kv import TransferFailed, new_room
from segue.kv.ranks.checksums import Digester

pytestmark = [pytest.mark.sglang, pytest.mark.model]
#: tables that remember ends until their deadline, peers, and the uses of rooms
REMEMBERED = {"ended", "deadlines", "peers", "room_uses"}
Ranks = tuple[Prefill, Prefill, Decode]


@pytest.fixture(scope="module", autouse=True)
def configuration() -> None:
    """Two DP ranks of prefill: decode asks the bootstrap server which one has a room."""
    model = str(resolve_model(DEFAULT_MODEL, progress=lambda *_: None))
    publish_configuration(model, dp_size=2, load_balance_method="round_robin")


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two DP ranks of prefill and one rank of decode, with prefill's bootstrap server. The parameter: whether
    their pools are MLA's."""
    server, mla = start_disagg_service(), getattr(request, "param", False)
    made = Prefill(0, mla), Prefill(1, mla), Decode(mla)
    yield made
    for rank in made:
        rank.close()
    server.close()


def hand_over(prefill: Prefill, decode: Decode, tokens: int = 40, room: int = 0) -> None:
    """One request from intake to the release of its pages; decode has the KV and the first token."""
    release_kv_cache(handed_over(prefill, decode, tokens, room), decode.tree_cache, checkpoint=False)


def handed_over(prefill: Prefill, decode: Decode, tokens: int = 40, room: int = 0) -> Req:
    """A request whose KV decode has."""
    room = room or new_room()
    prefill.add(request(room, tokens))
    req = decode.add(request(room, tokens))
    turns(lambda: req in decode.waiting_queue and room in prefill.ended, prefill, decode)
    assert prefill.ended[room] == ""
    assert all(map(torch.equal, decode.kv(req, tokens), prefill.computed[room][-1]))
    assert req.output_ids[-1] == 4711
    decode.waiting_queue.remove(req)
    return req


def retract(req: Req, decode: Decode, *, backup: bool) -> None:
    """Take the memory of a request that decode computes."""
    with get_disagg().override(disaggregation_mode="decode"):
        assert release_req(
            req=req,
            remaing_req_count=1,
            req_to_token_pool=decode.req_to_token_pool,
            token_to_kv_pool_allocator=decode.token_to_kv_pool_allocator,
            tree_cache=decode.tree_cache,
            hisparse_coordinator=None,
            offload_kv=backup,
        )


def at_rest(*ranks: Prefill | Decode) -> None:
    """No page, row, slot or entry of a table is held; SGLang's own tables are empty, too."""

    def full() -> bool:
        tables = [rank.manager.handoffs.sizes() for rank in ranks]
        return any(size for table in tables for name, size in table.items() if name not in REMEMBERED)

    turns(lambda: all(rank.at_rest() for rank in ranks) and not full(), *ranks)
    for rank in ranks:
        tables = ("request_status", "addr_to_rooms_tracker", "failure_records", "transfer_infos")
        assert [name for name in tables if getattr(rank.manager, name, None)] == []


@pytest.mark.parametrize("ranks", [False, True], indirect=True, ids=["mha", "mla"])
def test_a_request_through_sglangs_queues(ranks: Ranks) -> None:
    prefill, other, decode = ranks
    for rank in (prefill, other):
        hand_over(rank, decode, tokens=3 * PAGE - 5)
    at_rest(*ranks)


def test_21299_a_receiver_exists_before_its_prefill_rank_is_known(ranks: Ranks) -> None:
    """It is polled in the queue meanwhile, and does not hold the others up."""
    prefill, _, decode = ranks
    room = new_room()
    early = decode.add(request(room, PAGE))
    hand_over(prefill, decode)
    assert early not in decode.waiting_queue
    prefill.add(request(room, PAGE))
    turns(lambda: early in decode.waiting_queue, prefill, decode)
    assert all(map(torch.equal, decode.kv(early, PAGE), prefill.computed[room][-1]))
    release_kv_cache(early, decode.tree_cache, checkpoint=False)
    at_rest(*ranks)


def test_22901_the_registration_of_a_rank_costs_no_time_to_first_token(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is in prefill's queue while the bootstrap server does not answer."""
    prefill, _, decode = ranks
    answers = threading.Event()
    post = prefill.manager._post

    def late(*args: object) -> None:
        answers.wait(10.0)
        post(*args)

    monkeypatch.setattr(prefill.manager, "_post", late)
    room = new_room()
    prefill.add(request(room, PAGE))
    req = decode.add(request(room, PAGE))
    for rank in (prefill, decode):
        rank.turn()
    assert len(prefill.disagg_prefill_bootstrap_queue.queue) == 1
    answers.set()
    turns(lambda: req in decode.waiting_queue, prefill, decode)
    release_kv_cache(req, decode.tree_cache, checkpoint=False)
    at_rest(*ranks)


def test_a_hint_that_contradicts_the_rank_ends_the_request_on_both_sides(ranks: Ranks) -> None:
    prefill, other, decode = ranks
    room = new_room()
    for rank in (prefill, decode):
        rank.add(request(room, PAGE, disagg_prefill_dp_rank=1))
    turns(lambda: room in prefill.ended and room in decode.ended, prefill, other, decode)
    assert "DP_RANK_CONFLICT: the request is on DP rank 0" in prefill.ended[room]
    assert "DP_RANK_CONFLICT: the request is on DP rank 0 of prefill" in decode.ended[room]
    hand_over(prefill, decode)
    at_rest(*ranks)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_24772_a_failure_before_the_transfer_is_heard_by_both_sides(ranks: Ranks, role: str) -> None:
    """The client of one leg leaves when both halves are there; decode has named its pages."""
    prefill, _, decode = ranks
    hand_over(prefill, decode)  # opens the session
    room = new_room()
    sent, got = prefill.add(request(room, PAGE)), decode.add(request(room, PAGE))
    turns(lambda: bool(decode.disagg_decode_transfer_queue.queue), decode)
    if role == "prefill":
        sent.disagg_kv_sender.abort()
    else:
        decode.disagg_decode_transfer_queue.queue[0].kv_receiver.abort()
    turns(lambda: room in prefill.ended and room in decode.ended, prefill, decode)
    assert "ABORTED_BY_CLIENT" in prefill.ended[room]
    assert "ABORTED_BY_CLIENT" in decode.ended[room]
    assert got not in decode.waiting_queue
    hand_over(prefill, decode)
    at_rest(*ranks)


def test_content_that_differs_on_decode_ends_the_request_on_both_sides(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _, decode = ranks
    checksum = Digester._checksum

    def other_on_decode(self: Digester, effect: Any) -> int:
        return checksum(self, effect) ^ (self._memory is decode.manager.handoffs.pool.memory)

    with monkeypatch.context() as patch:
        patch.setattr(Digester, "_checksum", other_on_decode)
        room = new_room()
        prefill.add(request(room, 3 * PAGE))
        req = decode.add(request(room, 3 * PAGE))
        turns(lambda: room in prefill.ended and room in decode.ended, prefill, decode)
    assert prefill.ended[room].endswith(decode.ended[room][-60:])
    assert "CHECKSUM_MISMATCH" in decode.ended[room]
    assert req not in decode.waiting_queue
    hand_over(prefill, decode)
    at_rest(*ranks)


def test_a_failure_of_prefill_has_the_same_reason_on_both_sides(ranks: Ranks) -> None:
    prefill, _, decode = ranks
    room = new_room()
    sent = prefill.add(request(room, 3 * PAGE))
    decode.add(request(room, 3 * PAGE))
    turns(lambda: bool(decode.disagg_decode_transfer_queue.queue), decode)
    sent.disagg_kv_sender.half.fail(TransferFailed("ECC error on GPU 3"))
    turns(lambda: room in prefill.ended and room in decode.ended, prefill, decode)
    for side in (prefill, decode):
        assert "TRANSFER_FAILED: ECC error on GPU 3" in side.ended[room]
    at_rest(*ranks)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("page_size", 2 * PAGE, "Page size mismatch"), ("attn_tp_size", 2, "prefill has --tp-size 1, decode 2")],
)
def test_a_prefill_that_does_not_fit_fails_requests_and_does_not_end_decode(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, value: int, text: str
) -> None:
    prefill, _, decode = ranks
    room = new_room()
    sent = prefill.add(request(room, PAGE))
    with monkeypatch.context() as patch:
        patch.setattr(decode.manager.kv_args if name == "page_size" else decode.manager, name, value)
        patch.setattr(decode.disagg_decode_prealloc_queue, "_ensure_retry_interval", 0.0)
        decode.add(request(room, PAGE))
        turns(lambda: room in decode.ended, decode)
    assert "LAYOUT_MISMATCH" in decode.ended[room]
    assert text in decode.ended[room]
    sent.disagg_kv_sender.abort()  # nobody tells it: it would wait for its bootstrap timeout
    turns(lambda: room in prefill.ended, prefill)
    hand_over(prefill, decode)
    at_rest(*ranks)


def test_a_successor_of_a_prefill_serves_at_the_same_address(ranks: Ranks) -> None:
    """Another incarnation registers at the bootstrap server; the request of the first one fails."""
    prefill, other, decode = ranks
    hand_over(prefill, decode)
    room = new_room()
    prefill.add(request(room, PAGE))
    decode.add(request(room, PAGE))
    turns(lambda: bool(decode.disagg_decode_transfer_queue.queue), decode)
    prefill.close()
    turns(lambda: room in decode.ended, decode)
    assert decode.ended[room]
    successor = Prefill(0)
    hand_over(successor, decode)
    at_rest(other, decode, successor)
    successor.close()


def test_pages_that_may_still_be_read_are_kept_from_prefills_allocator(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client leaves in mid-transfer, and SGLang frees the pages at once. No byte has left by then."""
    prefill, _, decode = ranks
    room = new_room()
    sent = prefill.add(request(room, 3 * PAGE))
    decode.add(request(room, 3 * PAGE))
    proven = threading.Event()
    released = SenderHalf.released.fget
    monkeypatch.setattr(SenderHalf, "released", property(lambda half: proven.is_set() and released(half)))
    monkeypatch.setattr(SenderHalf, "send", lambda half, pages, event=None: half.pages.extend(pages))
    turns(lambda: bool(prefill.disagg_prefill_inflight_queue), prefill, decode)
    sent.disagg_kv_sender.abort()
    turns(lambda: room in prefill.ended, prefill)
    assert prefill.manager.handoffs.sizes()["unproven_pages"] == 3
    assert prefill.token_to_kv_pool_allocator.available_size() == TOKENS - 3 * PAGE
    assert not sglang_plugin.is_fully_idle(lambda scheduler: True, prefill)
    proven.set()
    prefill.manager.handoffs.settle(sent.disagg_kv_sender.half)
    turns(prefill.at_rest, prefill)
    assert sglang_plugin.is_fully_idle(lambda scheduler: True, prefill)
    turns(lambda: room in decode.ended, decode)
    assert "ABORTED_BY_CLIENT" in decode.ended[room]
    at_rest(*ranks)


def test_decodes_pages_are_not_given_away_by_a_timeout(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang frees the pages of a failed request after 30 s, here at once, whoever still writes into them."""
    prefill, _, decode = ranks
    queue = decode.disagg_decode_transfer_queue
    monkeypatch.setattr(queue, "deferred_kv_release_timeout", 0.0)
    room = new_room()
    prefill.add(request(room, 3 * PAGE))
    decode.add(request(room, 3 * PAGE))
    proven = threading.Event()
    released = ReceiverHalf.released.fget
    monkeypatch.setattr(ReceiverHalf, "released", property(lambda half: proven.is_set() and released(half)))
    turns(lambda: bool(queue.queue), decode)
    queue.queue[0].kv_receiver.abort()
    turns(lambda: room in decode.ended, prefill, decode)
    for _ in range(3):
        decode.turn()
    assert decode.token_to_kv_pool_allocator.available_size() == TOKENS - 3 * PAGE
    assert queue.has_pending_deferred_releases()
    proven.set()
    at_rest(*ranks)


def test_a_room_that_comes_again_is_another_hand_off(ranks: Ranks) -> None:
    prefill, _, decode = ranks
    room = new_room()
    for _ in range(3):
        hand_over(prefill, decode, room=room)
        del prefill.ended[room]
    at_rest(*ranks)


@pytest.mark.parametrize("other", [{"first": 6}, {"cache_salt": "b"}], ids=["prompt", "salt"])
def test_decode_that_names_the_room_of_another_prompt_gets_nothing(
    ranks: Ranks, other: dict[str, Any]
) -> None:
    prefill, _, decode = ranks
    hand_over(prefill, decode)
    room, before = new_room(), [buffer.clone() for buffer in decode.buffers]
    prefill.add(request(room, 3 * PAGE))
    req = decode.add(request(room, 3 * PAGE, **other))
    turns(lambda: room in prefill.ended and room in decode.ended, prefill, decode)
    for side in (prefill, decode):
        assert "METADATA_MISMATCH: decode asks for another prompt" in side.ended[room]
    assert all(map(torch.equal, decode.buffers, before))
    assert list(req.output_ids) == []
    hand_over(prefill, decode)
    at_rest(*ranks)


@pytest.mark.parametrize("host", ["169.254.169.254", "10.0.0.1", "example.org/x?y="])
def test_decode_asks_no_host_that_a_client_makes_up(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    prefill, _, decode = ranks
    hand_over(prefill, decode)
    asked: list[object] = []
    monkeypatch.setattr(requests.Session, "send", lambda *args, **kwargs: asked.append(args))
    room = new_room()
    decode.add(request(room, PAGE, bootstrap_host=host))
    turns(lambda: room in decode.ended, decode)
    assert "bootstrap_host" in decode.ended[room]
    assert asked == []
    monkeypatch.undo()
    hand_over(prefill, decode)
    at_rest(*ranks)


class Redirects(BaseHTTPRequestHandler):
    """A bootstrap server of a client's that names another service."""

    to = ""
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(302 if self.to else 500)
        self.send_header("Location", self.to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_sglangs_own_question_follows_no_redirect(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, _, decode = ranks
    with HTTPServer(("127.0.0.1", 0), Redirects) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(Redirects, "to", f"http://127.0.0.1:{server.server_port}/secret")
        monkeypatch.setattr(decode.disagg_decode_prealloc_queue, "_ensure_retry_interval", 0.0)
        room = new_room()
        decode.add(request(room, PAGE, bootstrap_port=server.server_port))
        turns(lambda: room in decode.ended, decode)
        server.shutdown()
        thread.join()
    assert "BOOTSTRAP_UNREACHABLE: no prefill answers" in decode.ended[room]
    assert Redirects.asked
    assert {path.partition("?")[0] for path in Redirects.asked} == {"/route"}
    hand_over(prefill, decode)
    at_rest(*ranks)


def test_samples_of_one_request_share_a_room(ranks: Ranks) -> None:
    """`n` of a request: each is a hand-off of its own, in the order of their intake."""
    prefill, _, decode = ranks
    room = new_room()
    samples = []
    for _ in range(3):
        prefill.add(request(room, 40))
        samples.append(decode.add(request(room, 40)))
    turns(lambda: len(decode.waiting_queue) == 3 and prefill.at_rest(), prefill, decode)
    for req, computed in zip(samples, prefill.computed[room], strict=True):
        assert all(map(torch.equal, decode.kv(req, 40), computed))
        release_kv_cache(req, decode.tree_cache, checkpoint=False)
    at_rest(*ranks)


def test_a_retracted_request_comes_back_from_its_backup(ranks: Ranks) -> None:
    """`cpu_tensor`. The other backup, `host_pool`, calls CUDA's runtime, also without a GPU."""
    prefill, _, decode = ranks
    req = handed_over(prefill, decode)
    [computed] = prefill.computed[req.bootstrap_room]
    retract(req, decode, backup=True)
    assert decode.at_rest()
    hand_over(prefill, decode)  # in the same pages
    decode.disagg_decode_prealloc_queue.add(req, is_retracted=True)
    turns(lambda: req in decode.waiting_queue, decode)
    assert all(map(torch.equal, decode.kv(req, 40), computed))
    release_kv_cache(req, decode.tree_cache, checkpoint=False)
    at_rest(*ranks)


def test_a_retracted_request_is_computed_again_in_its_room(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after new weights: SGLang's decode asks prefill over HTTP, and the KV comes in another hand-off."""
    prefill, _, decode = ranks
    req = handed_over(prefill, decode)
    retract(req, decode, backup=False)
    assert decode.at_rest()
    req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
    req.pd_rebootstrap_in_progress = True
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(decode.manager, "submit_prefill_recompute", lambda _, payload: asked.append(payload))
    queue = decode.disagg_decode_prealloc_queue
    queue.hold_rebootstrap(req)
    queue.enqueue_held_rebootstrap()
    turns(lambda: bool(asked), decode)
    assert asked[0]["bootstrap_room"] == req.bootstrap_room
    prefill.add(request(req.bootstrap_room, len(asked[0]["input_ids"])))
    turns(lambda: req in decode.waiting_queue and prefill.at_rest(), prefill, decode)
    first, second = prefill.computed[req.bootstrap_room]
    assert all(map(torch.equal, decode.kv(req, 40), second))
    assert not torch.equal(first[0], second[0])
    assert req.output_ids[-1] == 4711
    release_kv_cache(req, decode.tree_cache, checkpoint=False)
    at_rest(*ranks)


def test_samples_that_are_computed_again_get_their_own_kv(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples in one room with other tokens so far. SGLang asks prefill for them in any order."""
    prefill, _, decode = ranks
    room = new_room()
    samples = []
    for _ in range(3):
        prefill.add(request(room, 40))
        samples.append(decode.add(request(room, 40)))
    turns(lambda: len(decode.waiting_queue) == 3 and prefill.at_rest(), prefill, decode)
    decode.waiting_queue.clear()
    for number, req in enumerate(samples):
        req.output_ids.extend([100 + number, 4711])
        retract(req, decode, backup=False)
        req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        req.pd_rebootstrap_in_progress = True
    assert decode.at_rest()
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(decode.manager, "submit_prefill_recompute", lambda _, payload: asked.append(payload))
    for req in samples:
        decode.disagg_decode_prealloc_queue.add(req, is_rebootstrap=True)
    turns(lambda: len(asked) == 3, decode)
    for payload in asked[::-1]:
        again = request(room, 0)
        again.origin_input_ids = array("q", payload["input_ids"])
        prefill.add(again)
    turns(lambda: len(decode.waiting_queue) == 3 and prefill.at_rest(), prefill, decode)
    for req, payload in zip(samples, asked, strict=True):
        assert all(map(torch.equal, decode.kv(req, 42), prefill.computed_of[tuple(payload["input_ids"])]))
        release_kv_cache(req, decode.tree_cache, checkpoint=False)
    at_rest(*ranks)


def test_a_retracted_request_that_prefill_cannot_be_asked_for_ends(ranks: Ranks) -> None:
    """Nothing listens at prefill's HTTP port."""
    prefill, _, decode = ranks
    req = handed_over(prefill, decode)
    retract(req, decode, backup=False)
    req.pd_rebootstrap_in_progress = True
    decode.disagg_decode_prealloc_queue.add(req, is_rebootstrap=True)
    turns(lambda: bool(decode.ended.get(req.bootstrap_room)), prefill, decode)
    assert "BOOTSTRAP_UNREACHABLE: PD retract rebootstrap" in decode.ended[req.bootstrap_room]
    at_rest(*ranks)


def test_24601_nothing_is_left_over_1000_rooms(ranks: Ranks) -> None:
    """Half of them are handed over; of the others one client leaves, in one of three moments."""
    prefill, _, decode = ranks
    for number in range(1000):
        if number % 2:
            hand_over(prefill, decode, tokens=PAGE)
            continue
        room = new_room()
        sent = prefill.add(request(room, PAGE))
        req = decode.add(request(room, PAGE))
        moment = number // 2 % 3
        if moment:
            turns(lambda: bool(decode.disagg_decode_transfer_queue.queue), decode)
        if moment == 2:
            prefill.turn()
        waiting = decode.disagg_decode_transfer_queue.queue or decode.disagg_decode_prealloc_queue.queue
        halves = [sent.disagg_kv_sender, waiting[0].kv_receiver]
        halves[number // 6 % 2].abort()
        turns(
            lambda room=room, req=req: (
                room in prefill.ended and (room in decode.ended or req in decode.waiting_queue)
            ),
            prefill,
            decode,
        )
        if req in decode.waiting_queue:  # it had all KV when prefill's client left
            decode.waiting_queue.remove(req)
            release_kv_cache(req, decode.tree_cache, checkpoint=False)
    at_rest(*ranks)
