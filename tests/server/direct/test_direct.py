"""Direct mode: both legs of a request posted to the doors of real instances, as foreign routers post them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
import tiny_model
import torch
from deployment import Deployment, deployment

from segue.kv.ids import Role
from segue.server.direct import direct_server
from segue.server.frontend.legs import legs_of
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.instance.instance import Instance
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.prefill import PrefillScheduler

PROMPT = "a prompt of some pages, which both legs carry"
ASK = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "seed": 5, "return_token_ids": True}
#: What vllm-router asks prefill for.
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
Answer = httpx.Response


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tiny_model.save(tmp_path_factory.mktemp("tiny"))
    (made / "chat_template.jinja").write_text(tiny_model.TEMPLATE)
    return made


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Deployment]:
    with deployment(Role.PREFILL, Role.DECODE, http_port=0, model=str(folder)) as made:
        yield made


@pytest.fixture(autouse=True)
def _at_rest(pair: Deployment) -> Iterator[None]:
    yield
    pair.assert_comes_to_rest()
    for role in (Role.PREFILL, Role.DECODE):
        until = time.monotonic() + 60
        while any((held := of(pair, role)._direct_server.tables()).values()):  # type: ignore[union-attr]
            assert time.monotonic() < until, held


def of(made: Deployment, role: Role) -> Instance:
    [found] = made.by_role(role)
    return found


def url(made: Deployment, role: Role) -> str:
    http = of(made, role).http
    assert http is not None
    return "http://{}:{}".format(*http.address)


def run(made: Deployment, work: Callable[[Legs], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await work(Legs(made, client))

    asyncio.run(main())


class Legs:
    """A router without any logic."""

    def __init__(self, made: Deployment, client: httpx.AsyncClient) -> None:
        self.prefill, self.decode = url(made, Role.PREFILL), url(made, Role.DECODE)
        self.client = client
        config = of(made, Role.PREFILL).config
        self.address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": config.bootstrap_port}

    def body(self, **more: Any) -> dict[str, Any]:
        return ASK | self.address | {"bootstrap_room": secrets.randbelow(2**62) + 1} | more

    async def both(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[Answer, Answer]:
        return await asyncio.gather(self.one(self.prefill, body, path), self.one(self.decode, body, path))

    def at(self, role: Role) -> str:
        return self.prefill if role is Role.PREFILL else self.decode

    async def one(self, at: str, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
        return await self.client.post(at + path, json=body)

    async def prefill_first(self, body: dict[str, Any]) -> Answer:
        return await self.one(
            self.prefill, body | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": REMOTE}
        )


def tokens(answer: Answer) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def code(answer: Answer) -> str:
    return f"{answer.status_code} {answer.json()['error']['code']}"


def expected(made: Deployment, prompt: str = PROMPT, **sampling: Any) -> list[int]:
    """The same request as a frontend of ours places it."""
    name = secrets.token_hex(4)
    options = {"max_tokens": 9, "temperature": 0.0, **sampling}
    prefill = of(made, Role.PREFILL)
    ids = ModelTokenizer.load(prefill.config.model).encode(prompt, special=True)
    made.front.submit(name, ids, prefill, of(made, Role.DECODE), **options)
    return made.front.tokens(name)


# ---- SGLang's style --------------------------------------------------------------------------------


def test_both_legs_give_the_tokens_of_the_paired_mode_and_prefill_answers_a_short_json(
    pair: Deployment,
) -> None:
    wanted = expected(pair)

    async def work(legs: Legs) -> None:
        prefill, decode = await legs.both(legs.body(model="unknown", no_stop_trim=False, rid=None))
        assert tokens(decode) == [wanted]
        assert prefill.status_code == 200
        assert prefill.json()["choices"] == []

    run(pair, work)


def test_a_stream_is_relayed_while_prefill_answers_whole(pair: Deployment) -> None:
    wanted = expected(pair)

    async def work(legs: Legs) -> None:
        prefill, decode = await legs.both(legs.body(stream=True))
        assert prefill.json()["object"] == "prefill"
        lines = [line.removeprefix("data: ") for line in decode.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        assert [t for line in lines for t in json.loads(line)["choices"][0]["token_ids"]] == wanted

    run(pair, work)


def test_several_samples_and_prompts_carry_lists(pair: Deployment) -> None:
    one, other = expected(pair), expected(pair, "another prompt")

    async def work(legs: Legs) -> None:
        lists = {key: [value] * 2 for key, value in legs.address.items()}
        _, decode = await legs.both(legs.body(**lists, bootstrap_room=[41, 42], n=2))
        assert tokens(decode) == [one, one]
        prompts = legs.body(**lists, bootstrap_room=[43, 44], prompt=[PROMPT, "another prompt"])
        _, decode = await legs.both(prompts)
        assert tokens(decode) == [one, other]

    run(pair, work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
def test_other_apis_are_answered_by_the_pair(
    pair: Deployment, path: str, fields: dict[str, Any], stream: bool
) -> None:
    """They were a 404 in plain text."""

    async def work(legs: Legs) -> None:
        room = {"bootstrap_room": secrets.randbelow(2**62) + 1, "temperature": 0, "stream": stream}
        prefill, decode = await legs.both(fields | legs.address | room, path)
        assert prefill.status_code == 200, prefill.text
        assert prefill.json()["object"] == "prefill"
        assert decode.status_code == 200, decode.text
        assert '"output_tokens":4' in decode.text
        assert decode.text.startswith("event: " if stream else "{")

    run(pair, work)


@pytest.mark.parametrize("stream", [False, True])
def test_sglang_s_own_endpoint_answers_in_its_form(pair: Deployment, stream: bool) -> None:
    wanted = expected(pair, max_tokens=4)

    async def work(legs: Legs) -> None:
        native = {
            "text": PROMPT,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "stream": stream,
            "rid": "mine",
            **legs.address,
        }
        prefill, decode = await legs.both(native | {"bootstrap_room": 51 + 10 * stream}, "/generate")
        assert prefill.status_code == 200
        text = decode.text.removesuffix("data: [DONE]\n\n").strip().split("data: ")[-1]
        answer = json.loads(text)
        assert answer["output_ids"] == wanted
        meta = answer["meta_info"]
        assert (meta["id"], meta["completion_tokens"], len(meta["output_token_logprobs"])) == ("mine", 4, 4)
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 4
        rooms = [52 + 10 * stream, 53 + 10 * stream]
        batch = native | {"text": [PROMPT, PROMPT], "stream": False, "bootstrap_room": rooms}
        _, decode = await legs.both(batch, "/generate")
        assert [one["output_ids"] for one in decode.json()] == [wanted, wanted]

    run(pair, work)


def test_generate_scores_a_prompt_as_text_completions_do(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        echoed = legs.body(bootstrap_room=91, echo=True, logprobs=1, max_tokens=2, **legs.address)
        _, decode = await legs.both(echoed)
        choice = decode.json()["choices"][0]
        prompt, logprobs = choice["prompt_token_ids"], choice["logprobs"]["token_logprobs"]
        native = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 1, **legs.address}
        native["return_text_in_logprobs"] = True
        for room, start, count in ((92, 0, 2), (93, 2, 2), (94, 0, 0)):
            sampling = {"max_new_tokens": count, "temperature": 0}
            body = native | {"logprob_start_len": start, "sampling_params": sampling}
            _, decode = await legs.both(body | {"bootstrap_room": room}, "/generate")
            meta = decode.json()["meta_info"]
            scored = meta["input_token_logprobs"]
            assert [token for _, token, _ in scored] == prompt[start:]
            assert scored[0][0] is None
            assert [value for value, _, _ in scored[1:]] == logprobs[start + 1 : len(prompt)]
            assert [text for _, _, text in scored] == choice["logprobs"]["tokens"][start : len(prompt)]
            assert [top and len(top) for top in meta["input_top_logprobs"]] == [None] + [1] * (
                len(scored) - 1
            )
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == count
            assert len(decode.json()["output_ids"]) == count

    run(pair, work)


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_data": "x"},
        {"text": None},
        {"input_ids": [1]},
        {"sampling_params": {"max_new_tokens": -1}},
    ],
)
def test_what_generate_cannot_do_is_refused_by_both_legs(pair: Deployment, wrong: dict[str, Any]) -> None:
    async def work(legs: Legs) -> None:
        body = {"text": "x", **legs.address, "bootstrap_room": secrets.randbelow(2**60) + 1} | wrong
        for answer in await legs.both(body, "/generate"):
            assert code(answer) == "400 INVALID_REQUEST"

    run(pair, work)


def test_lesson_19_a_bootstrap_host_that_is_not_registered_is_never_contacted(
    pair: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    looked_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **options: asked.append(host) or looked_up(host, *more, **options),
    )
    with socket.create_server(("127.0.0.2", 0)) as trap:
        trap.setblocking(False)

        async def work(legs: Legs) -> None:
            port = trap.getsockname()[1]
            for host, at in (("nowhere.example", port), ("127.0.0.1", port), ("10.1.2.3", None)):
                for answer in await legs.both(legs.body(bootstrap_host=host, bootstrap_port=at)):
                    assert code(answer) == "503 BOOTSTRAP_UNREACHABLE"

        monkeypatch.setattr(direct_server, "FIND_S", 0.01)
        run(pair, work)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert set(asked) <= {"127.0.0.1", b"127.0.0.1"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"bootstrap_room": 0},
        {"bootstrap_room": 2**63},
        {"bootstrap_room": []},
        {"bootstrap_host": None},
        {"bootstrap_host": ["127.0.0.1", "10.0.0.1"], "bootstrap_room": [1, 2]},
        {"bootstrap_room": "x"},
        {"bootstrap_room": None},
    ],
)
def test_a_body_without_a_proper_room_is_refused_by_both_legs(
    pair: Deployment, wrong: dict[str, Any]
) -> None:
    async def work(legs: Legs) -> None:
        for answer in await legs.both(legs.body(**wrong)):
            assert code(answer) == "400 INVALID_REQUEST"

    run(pair, work)


def test_what_decode_refuses_reaches_the_prefill_leg_at_once(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        for answer in await legs.both(legs.body(prompt="x" * 5000)):
            assert answer.status_code == 400
            assert "4096" in answer.text

    run(pair, work)


def test_a_prefill_that_breaks_answers_500_and_decode_ends_at_once(
    pair: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = of(pair, Role.PREFILL).engine

    def broken(*_: object) -> None:
        raise RuntimeError("the engine is broken")

    async def work(legs: Legs) -> None:
        for answer in await legs.both(legs.body(prompt="nobody has cached this")):
            assert code(answer) == "500 INTERNAL"

    with monkeypatch.context() as patch:
        patch.setattr(engine, "launch", broken)
        run(pair, work)
    assert_serves(pair)


def assert_serves(made: Deployment) -> None:
    async def work(legs: Legs) -> None:
        _, decode = await legs.both(legs.body())
        assert decode.status_code == 200

    run(made, work)


def handoffs(made: Deployment, role: Role) -> dict[Any, Any]:
    """Those of one instance, whose leader's thread opens and forgets them."""
    scheduler = of(made, role).scheduler
    assert isinstance(scheduler, PrefillScheduler | DecodeScheduler)
    return scheduler.table


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0)


async def leave(leg: asyncio.Task[Answer]) -> None:
    """Its client closes the connection."""
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)


@contextmanager
def paused(made: Deployment) -> Iterator[None]:
    """Prefill computes no prompt that decode has not bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of(made, Role.PREFILL).scheduler, "_start_unbound", lambda _now: None)
        yield


def test_a_client_that_leaves_the_prefill_leg_ends_the_decode_leg(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        body = legs.body(prompt="nobody has cached what is left")
        lone = asyncio.get_running_loop().create_task
        leg = lone(legs.one(legs.prefill, body))
        await until(lambda: handoffs(pair, Role.PREFILL))
        await leave(leg)
        await until(lambda: not handoffs(pair, Role.PREFILL))
        decode = await legs.one(legs.decode, body)
        assert code(decode) == "499 ABORTED_BY_CLIENT"

    with paused(pair):
        run(pair, work)


@pytest.mark.parametrize("first", [Role.PREFILL, Role.DECODE])
def test_a_client_that_leaves_the_decode_leg_ends_the_prefill_leg(pair: Deployment, first: Role) -> None:
    """Whichever leg comes first."""
    begin = of(pair, Role.DECODE).scheduler

    async def work(legs: Legs) -> None:
        body = legs.body(prompt="nobody has cached what is left here")
        lone = asyncio.get_running_loop().create_task
        if first is Role.PREFILL:
            prefill = lone(legs.one(legs.prefill, body))
            await until(lambda: handoffs(pair, Role.PREFILL))
        decode = lone(legs.one(legs.decode, body))
        await until(lambda: handoffs(pair, Role.DECODE))
        await leave(decode)
        await until(lambda: not handoffs(pair, Role.DECODE))
        if first is Role.DECODE:
            prefill = lone(legs.one(legs.prefill, body))
        assert code(await prefill) == "499 ABORTED_BY_CLIENT"

    with paused(pair), pytest.MonkeyPatch.context() as patch:
        patch.setattr(begin, "_reserve", lambda _state: False)  # decode is full
        run(pair, work)


def server_of(made: Deployment, role: Role) -> Any:
    """The direct-mode server, which the first request has made."""
    lazy = of(made, role)._direct_server
    assert lazy is not None
    return of(made, role).plane.io.call(lazy.opened(), 60)


def refuse_at_the_door(server: Any, how: str, patch: pytest.MonkeyPatch) -> int:
    """Have the server refuse each leg before its leader gets it; the status of its answer."""
    if how == "too long":
        short = dataclasses.replace(server.card(), context_tokens=2)
        patch.setattr(server, "card", lambda: short)
        return 400
    if how == "full":
        patch.setattr(server.fleet, "limits", SimpleNamespace(max_queue=0))
        return 429
    for name in ("choose", "refuser"):
        patch.setattr(server.fleet.router, name, lambda *_, **__: None)
    return 503


@pytest.mark.parametrize("order", ["the other leg is there", "at once", "the refused leg came first"])
@pytest.mark.parametrize("how", ["too long", "full", "nobody"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_leg_that_its_door_refuses_ends_the_other_one_with_its_error(
    pair: Deployment, role: Role, how: str, order: str
) -> None:
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    assert_serves(pair)  # the two have met

    async def work(legs: Legs) -> None:
        lists = {key: [value] * 2 for key, value in legs.address.items()}
        rooms = [secrets.randbelow(2**62) + 1 for _ in range(2)]
        body = legs.body(**lists, bootstrap_room=rooms, n=2)
        lone = asyncio.get_running_loop().create_task
        if order == "the refused leg came first":
            refused = await legs.one(legs.at(role), body)
            left = await legs.one(legs.at(other), body)
        else:
            waiting = lone(legs.one(legs.at(other), body))
            if order == "the other leg is there":
                await until(lambda: len(handoffs(pair, other)) == 2)
            refused = await legs.one(legs.at(role), body)
            left = await waiting
        assert refused.status_code == left.status_code == wanted

    with paused(pair), pytest.MonkeyPatch.context() as patch:
        wanted = refuse_at_the_door(server_of(pair, role), how, patch)
        run(pair, work)


def test_a_computed_prompt_whose_decode_leg_is_refused_at_the_door_is_let_go(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        params = (await legs.prefill_first(ASK)).json()["kv_transfer_params"]
        assert of(pair, Role.PREFILL).scheduler.sizes()["unbound_rooms"] == 1
        refused = await legs.one(legs.decode, ASK | {"kv_transfer_params": params})
        assert refused.status_code == wanted
        await until(lambda: not handoffs(pair, Role.PREFILL))

    assert_serves(pair)
    with pytest.MonkeyPatch.context() as patch:
        wanted = refuse_at_the_door(server_of(pair, Role.DECODE), "too long", patch)
        run(pair, work)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_client_that_leaves_while_its_door_tokenizes_ends_the_other_leg(
    pair: Deployment, role: Role
) -> None:
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    assert_serves(pair)
    server, begun = server_of(pair, role), threading.Event()

    async def never(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def work(legs: Legs) -> None:
        body = legs.body()
        lone = asyncio.get_running_loop().create_task
        leg = lone(legs.one(legs.at(role), body))
        await until(begun.is_set)
        waiting = lone(legs.one(legs.at(other), body))
        await until(lambda: handoffs(pair, other))
        await leave(leg)
        assert code(await waiting) == "499 ABORTED_BY_CLIENT"

    with paused(pair), pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "plan", never)
        run(pair, work)


@pytest.mark.slow
def test_an_abandoned_prefill_leg_ends_by_its_deadline_and_is_a_metric(
    pair: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered when its prompt is computed; its room waits for decode."""
    server = server_of(pair, Role.PREFILL)
    limits = msgspec.structs.replace(server.settings.limits, request_budget_s=2.0)

    async def work(legs: Legs) -> None:
        async def table(name: str) -> float:
            text = (await legs.client.get(url(pair, Role.PREFILL) + "/metrics")).text
            [line] = [line for line in text.splitlines() if f'"{name}"' in line]
            return float(line.split()[1])

        before = await table("abandoned_rooms")
        body = legs.body()
        assert (await legs.one(legs.prefill, body)).status_code == 200
        assert await table("unbound_rooms") == 1
        await until(lambda: not handoffs(pair, Role.PREFILL))
        assert await table("abandoned_rooms") == before + 1
        assert await table("unbound_rooms") == 0
        assert code(await legs.one(legs.decode, body)) == "504 BOOTSTRAP_TIMEOUT"

    with monkeypatch.context() as patch:
        patch.setattr(server, "settings", dataclasses.replace(server.settings, limits=limits))
        run(pair, work)


def test_an_abandoned_decode_leg_ends_at_prefill_s_limit(pair: Deployment) -> None:
    exchange = of(pair, Role.PREFILL).manager.exchange  # type: ignore[union-attr]
    limits = exchange.rooms._limits

    async def work(legs: Legs) -> None:
        assert code(await legs.one(legs.decode, legs.body())) == "504 BOOTSTRAP_TIMEOUT"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.rooms, "_limits", msgspec.structs.replace(limits, early_wait_s=0.05))
        run(pair, work)


@pytest.mark.parametrize("how", ["too large", "no such path"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_leg_that_is_refused_unread_leaves_the_other_one_to_its_own_limit(
    pair: Deployment, role: Role, how: str
) -> None:
    """The room is in the body alone, so nobody can be told."""
    server, prefill = server_of(pair, role), server_of(pair, Role.PREFILL)
    exchange = of(pair, Role.PREFILL).manager.exchange  # type: ignore[union-attr]
    short = msgspec.structs.replace(prefill.settings.limits, request_budget_s=1.0)

    async def work(legs: Legs) -> None:
        body = legs.body()
        path = "/v1/nothing" if how == "no such path" else "/v1/completions"
        large = body | {"user": "x" * 20_000 if how == "too large" else ""}
        refused = await legs.one(legs.at(role), large, path)
        assert refused.status_code == {"too large": 413, "no such path": 404}[how]
        if role is Role.PREFILL:
            assert code(await legs.one(legs.decode, body)) == "504 BOOTSTRAP_TIMEOUT"
        else:
            assert (await legs.one(legs.prefill, body)).status_code == 200, (
                "it is answered when it is computed"
            )
            await until(lambda: not handoffs(pair, Role.PREFILL))
            assert of(pair, Role.PREFILL).scheduler.abandoned == before + 1

    before = of(pair, Role.PREFILL).scheduler.abandoned
    with pytest.MonkeyPatch.context() as patch:
        waits = msgspec.structs.replace(exchange.rooms._limits, early_wait_s=0.05)
        patch.setattr(exchange.rooms, "_limits", waits)
        patch.setattr(prefill, "settings", dataclasses.replace(prefill.settings, limits=short))
        small = msgspec.structs.replace(server.settings.limits, max_body_bytes=10_000)
        if how == "too large":
            patch.setattr(server, "settings", dataclasses.replace(server.settings, limits=small))
        run(pair, work)


def test_a_room_that_is_in_use_is_refused_and_the_first_request_goes_on(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        body = legs.body()
        first = asyncio.get_running_loop().create_task(legs.one(legs.prefill, body))
        await until(lambda: handoffs(pair, Role.PREFILL))
        assert code(await legs.one(legs.prefill, body)) == "400 INVALID_REQUEST"
        assert (await legs.one(legs.decode, body)).status_code == 200
        assert (await first).status_code == 200

    run(pair, work)


@pytest.mark.parametrize("end", ["success", "refused", "left"])
def test_a_room_that_is_used_again_at_once_is_refused_on_both_sides(pair: Deployment, end: str) -> None:
    """Not that of the first request, whose KV would be another prompt's."""

    async def work(legs: Legs) -> None:
        body = legs.body()
        if end == "success":
            assert (await legs.both(body))[1].status_code == 200
        elif end == "refused":
            with pytest.MonkeyPatch.context() as patch:
                refuse_at_the_door(server_of(pair, Role.DECODE), "full", patch)
                assert (await legs.both(body))[1].status_code == 429
        else:
            with paused(pair):
                leg = asyncio.get_running_loop().create_task(legs.one(legs.prefill, body))
                await until(lambda: handoffs(pair, Role.PREFILL))
                await leave(leg)
                await until(lambda: not handoffs(pair, Role.PREFILL))
        prefill, decode = await legs.both(body | {"prompt": "another prompt in the same room"})
        assert code(prefill) == "400 INVALID_REQUEST"
        assert decode.status_code in (400, 429, 499), decode.text
        assert (await legs.both(legs.body()))[1].status_code == 200

    assert_serves(pair)
    run(pair, work)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_rank_that_one_leg_alone_names_and_that_is_none_ends_both(
    pair: Deployment, role: Role, path: str
) -> None:
    """Its header is the leg's own."""

    async def work(legs: Legs) -> None:
        body, asked = legs.body(text=PROMPT), {"x-data-parallel-rank": "9"}
        both = [
            legs.client.post(legs.at(leg) + path, json=body, headers=asked if leg is role else {})
            for leg in (Role.PREFILL, Role.DECODE)
        ]
        answers = await asyncio.gather(*both)
        assert [code(answer) for answer in answers] == ["400 DP_RANK_OUT_OF_RANGE"] * 2

    assert_serves(pair)
    with paused(pair):
        run(pair, work)


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"])
def test_a_rank_that_is_none_is_refused_by_both_legs(pair: Deployment, name: str) -> None:
    async def work(legs: Legs) -> None:
        answers = await legs.both(legs.body(**{name: 9}))
        assert [code(answer) for answer in answers] == ["400 DP_RANK_OUT_OF_RANGE"] * 2

    run(pair, work)


def test_a_hint_does_not_contradict_the_rank_that_prefill_has_named(pair: Deployment) -> None:
    wanted = expected(pair)

    async def work(legs: Legs) -> None:
        params = (await legs.prefill_first(ASK)).json()["kv_transfer_params"]
        body = ASK | {"kv_transfer_params": params, "disagg_prefill_dp_rank": 9}
        assert tokens(await legs.one(legs.decode, body)) == [wanted]

    run(pair, work)


@pytest.mark.slow
def test_hundreds_of_refused_legs_keep_nobody_out(pair: Deployment) -> None:
    """Each is a word that prefill keeps for a request that never comes."""

    async def work(legs: Legs) -> None:
        with pytest.MonkeyPatch.context() as patch:
            refuse_at_the_door(server_of(pair, Role.DECODE), "too long", patch)
            refused = [legs.one(legs.decode, legs.body()) for _ in range(400)]
            assert {answer.status_code for answer in await asyncio.gather(*refused)} == {400}
        body = legs.body()
        decode = asyncio.get_running_loop().create_task(legs.one(legs.decode, body))
        early = of(pair, Role.PREFILL).manager.sizes  # type: ignore[union-attr]
        await until(lambda: early()["early"])  # its destination is there first
        assert (await legs.one(legs.prefill, body)).status_code == 200
        assert (await decode).status_code == 200

    assert_serves(pair)
    run(pair, work)


def test_unknown_bootstrap_addresses_reach_no_prefill(
    pair: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was a place in the table of every prefill: 128 of them refused all others for 30 s."""
    manager = of(pair, Role.PREFILL).manager
    assert manager is not None

    async def work(legs: Legs) -> None:
        assert (await legs.both(legs.body()))[1].status_code == 200  # the two have met
        before = manager.sizes()
        with monkeypatch.context() as short:
            short.setattr(direct_server, "FIND_S", 0.01)
            answers = await asyncio.gather(
                *(legs.one(legs.decode, legs.body(bootstrap_port=1)) for _ in range(128))
            )
        assert {code(answer) for answer in answers} == {"503 BOOTSTRAP_UNREACHABLE"}
        # What ended before is forgotten meanwhile: a table may have become smaller.
        tables = (
            "rooms",
            "early",
            "transfers",
            "handles",
            "receivers",
            "open_receivers",
            "unanswered",
            "peers",
        )
        assert {name: manager.sizes()[name] for name in tables if manager.sizes()[name] > before[name]} == {}
        assert (await legs.both(legs.body()))[1].status_code == 200

    run(pair, work)


def test_the_fast_path_makes_no_registry_call(pair: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """One DP rank of prefill: nobody registers or asks for a room, in either style."""
    asked: list[str] = []

    def noted(name: str) -> Any:
        async def call(*_more: Any) -> None:
            asked.append(name)

        return call

    for role in (Role.PREFILL, Role.DECODE):
        registry = of(pair, role)._registry
        for name in ("register_room", "resolve_room"):
            monkeypatch.setattr(registry, name, noted(name))

    async def work(legs: Legs) -> None:
        assert (await legs.both(legs.body()))[1].status_code == 200
        params = (await legs.prefill_first(ASK)).json()["kv_transfer_params"]
        assert (await legs.one(legs.decode, ASK | {"kv_transfer_params": params})).status_code == 200

    run(pair, work)
    assert asked == []


# ---- vLLM's style ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2},
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": None},
        {"min_tokens": 4},
        {"logprobs": 1},
        {"max_completion_tokens": 9},
        {"prompt": "one"},
        {"prompt": "x" * 64},
    ],
    ids=str,
)
def test_prefill_first_gives_the_tokens_of_the_paired_mode_without_computing_twice(
    pair: Deployment, more: dict[str, Any]
) -> None:
    sampling = {"temperature": float(more.get("temperature", 0)), "min_tokens": more.get("min_tokens", 0)}
    wanted = expected(pair, more.get("prompt", PROMPT), seed=more.get("seed", 5) or 5, **sampling)

    async def work(legs: Legs) -> None:
        body = ASK | more
        prefill = await legs.prefill_first(body)
        params = prefill.json()["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert not any("host" in key or "port" in key for key in params)
        launch = of(pair, Role.PREFILL).engine.launch
        with pytest.MonkeyPatch.context() as patch:
            steps: list[object] = []
            patch.setattr(of(pair, Role.PREFILL).engine, "launch", lambda *a: steps.append(a) or launch(*a))
            decode = await legs.one(legs.decode, body | {"kv_transfer_params": params})
        assert steps == []
        got = tokens(decode)
        assert len(got) == more.get("n", 1)
        if body["seed"] is not None:
            assert got[0] == wanted
        assert got[0][:1] == tokens(prefill)[0]

    run(pair, work)


def test_a_computed_prompt_is_handed_over_once_and_only_as_it_was_named(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        params = (await legs.prefill_first(ASK)).json()["kv_transfer_params"]
        name = params["segue_room"]
        for wrong in ("", "AAAA", name[:-8], "ä", 7, None, "x" * 5000):
            answer = await legs.one(legs.decode, ASK | {"kv_transfer_params": params | {"segue_room": wrong}})
            assert code(answer) == "400 INVALID_REQUEST"
        good = ASK | {"kv_transfer_params": params}
        assert (await legs.one(legs.decode, good)).status_code == 200
        again = await legs.one(legs.decode, good)
        assert code(again) == "400 INVALID_REQUEST"
        assert "needs a room of its own" in again.text

    run(pair, work)


def test_another_prompt_than_prefill_has_computed_is_refused_before_a_byte_moves(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        params = (await legs.prefill_first(ASK)).json()["kv_transfer_params"]
        other = ASK | {"kv_transfer_params": params, "prompt": "another prompt"}
        assert code(await legs.one(legs.decode, other)) == "500 METADATA_MISMATCH"
        for handle in [entry.handle for entry in handoffs(pair, Role.PREFILL).values()]:
            handle.abort()

    run(pair, work)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_large_body_is_searched_for_its_leg_in_a_thread(
    pair: Deployment, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 0.6 MB with many objects there took 80 ms of the instance's I/O thread."""
    where: list[str] = []

    def noted(raw: bytes) -> Any:
        where.append(threading.current_thread().name)
        return legs_of(raw)

    monkeypatch.setattr(direct_server, "legs_of", noted)
    body = ASK | {"kv_transfer_params": {"x": [0] * 20_000}}
    answer = httpx.post(url(pair, role) + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert [name.split("_")[0] for name in where] == ["tokenize"]


def test_neither_leg_answers_a_plain_request(pair: Deployment) -> None:
    async def work(legs: Legs) -> None:
        for answer in await legs.both(dict(ASK)):
            assert code(answer) == "400 INVALID_REQUEST"
            assert "bootstrap_room" in answer.text

    run(pair, work)


# ---- the rest of the door --------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_door_answers_what_routers_ask_and_names_no_path(
    pair: Deployment, role: Role, folder: Path
) -> None:
    async def work(legs: Legs) -> None:
        at, client = url(pair, role), legs.client
        for path in ("health", "health_generate", "get_server_info", "model_info", "v1/models", "metrics"):
            answer = await client.get(f"{at}/{path}")
            assert answer.status_code == 200
            assert str(folder) not in answer.text
        [load] = (await client.get(f"{at}/get_load")).json()
        assert set(load) == {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"}
        assert (await client.get(f"{at}/v1/loads")).json()["loads"][0]["dp_rank"] == 0
        rendered = (await client.post(f"{at}/v1/completions/render", json={"prompt": "abc"})).json()
        told = (await client.post(f"{at}/tokenize", json={"prompt": "abc"})).json()
        assert rendered["token_ids"] == told["tokens"]
        assert (await client.post(f"{at}/flush_cache")).status_code == 200

    tree = of(pair, role).scheduler.cache.tree
    assert_serves(pair)
    assert tree.pages
    run(pair, work)
    until = time.monotonic() + 60
    while tree.pages:
        assert time.monotonic() < until
