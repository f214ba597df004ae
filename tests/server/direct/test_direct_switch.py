"""Direct mode with two decode instances, one of which is switched to prefill while its requests run."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import tiny_model
import torch
from deployment import LIMITS, Deployment, deployment
from test_direct import ASK, REMOTE, expected, of, tokens, url

from ports import HeldPort
from segue.cli.main import main
from segue.kv.ids import Role
from segue.server.instance.instance import Instance
from segue.server.instance.rank_workers import open_replica
from segue.server.instance.role_lifecycle import RoleLifecycle
from segue.server.schedulers import prefill as prefill_scheduler
from segue.server.settings.commands import InstanceConfig
from segue.server.settings.shared_config import ModelConfig

pytestmark = pytest.mark.slow

#: Of the instance that is switched, where routers know it as prefill.
BOOTSTRAP = 18997
LONG = 600
Answer = httpx.Response


class Switched:
    """A decode instance, run as `segue decode` does it, in a thread."""

    def __init__(self, registry: str, folder: Path) -> None:
        self.port = HeldPort()
        config = InstanceConfig(
            model=str(folder),
            role=Role.DECODE,
            registry=registry,
            transport="shm",
            limit=LIMITS,
            http_port=self.port.port,
            bootstrap_port=BOOTSTRAP,
            engine=ModelConfig(chunk_tokens=512, dtype="float32", kv_gib=0.05),
        )
        self.url = f"http://127.0.0.1:{self.port.port}"
        self.registry = registry
        self.turns = RoleLifecycle(config, open_replica(config))
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.turns.run, args=(lambda _: self.ready.set(),))
        self.thread.start()
        assert self.ready.wait(60)

    @property
    def instance(self) -> Instance:
        return self.turns.instance

    async def switch(self, role: Role) -> None:
        name = self.instance.me.incarnation[:8]
        words = ["switch", name, role.value, "--registry", self.registry, "--timeout", "60"]
        assert await asyncio.to_thread(main, words) == 0
        assert self.instance.config.role is role

    async def drains(self) -> None:
        async with asyncio.timeout(60):
            while not self.instance.scheduler.admission.draining:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0)

    def close(self) -> None:
        self.turns.drain()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    torch.set_num_threads(1)
    folder = tiny_model.save(tmp_path_factory.mktemp("tiny"))
    with deployment(Role.PREFILL, Role.DECODE, http_port=0, model=str(folder)) as found:
        yield found


@pytest.fixture
def one(made: Deployment) -> Iterator[Switched]:
    registry = f"http://127.0.0.1:{made.registry.port}"
    found = Switched(registry, Path(of(made, Role.PREFILL).config.model))
    try:
        yield found
        made.assert_comes_to_rest()
    finally:
        found.close()


class Router:
    """Posts both legs as sglang-router and vllm-router do."""

    def __init__(self, client: httpx.AsyncClient, prefill: str, decode: str, bootstrap_port: int) -> None:
        self.client = client
        self.prefill, self.decode = prefill, decode
        self.address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port}

    async def post(self, at: str, body: dict[str, Any]) -> Answer:
        return await self.client.post(at + "/v1/completions", json=body)

    async def both(self, **more: Any) -> tuple[Answer, Answer]:
        body = ASK | self.address | {"bootstrap_room": secrets.randbelow(2**62) + 1} | more
        return await asyncio.gather(self.post(self.prefill, body), self.post(self.decode, body))

    async def computed(self) -> dict[str, Any]:
        """vLLM's first leg; the body of the second one."""
        first = await self.post(self.prefill, ASK | {"max_tokens": 1, "kv_transfer_params": REMOTE})
        assert first.status_code == 200, first.text
        return ASK | {"kv_transfer_params": first.json()["kv_transfer_params"]}


def test_a_decode_becomes_prefill_and_decode_again_and_no_request_is_lost(
    made: Deployment, one: Switched
) -> None:
    wanted, long = expected(made), expected(made, max_tokens=LONG, ignore_eos=True)
    port = of(made, Role.PREFILL).config.bootstrap_port

    async def work(client: httpx.AsyncClient) -> None:
        before = Router(client, url(made, Role.PREFILL), one.url, port)
        assert tokens((await before.both())[1]) == [wanted]

        # In flight as decode: the stream goes on, and new legs are refused on both sides.
        loop = asyncio.get_running_loop()
        open_request = loop.create_task(before.both(max_tokens=LONG, ignore_eos=True))
        async with asyncio.timeout(60):
            while not one.instance.scheduler.batch.running:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0)
        switching = loop.create_task(one.switch(Role.PREFILL))
        await one.drains()
        for answer in await before.both(prompt="a prompt that nobody computes any more"):
            # Prefill may have computed its part before it heard.
            assert answer.status_code in (200, 503), answer.text
        assert (await before.both())[1].status_code == 503
        assert tokens((await open_request)[1]) == [long]
        await switching

        # It serves as prefill, for another decode.
        after = Router(client, one.url, url(made, Role.DECODE), BOOTSTRAP)
        assert tokens((await after.both())[1]) == [wanted]
        assert tokens(await client.post(after.decode + "/v1/completions", json=await after.computed())) == [
            wanted
        ]
        # A leg that was meant for the decode that it was.
        assert (await before.post(one.url, ASK | before.address | {"bootstrap_room": 5})).status_code == 503

        # In flight as prefill: a computed prompt is still handed over.
        body = await after.computed()
        switching = loop.create_task(one.switch(Role.DECODE))
        await one.drains()
        assert {answer.status_code for answer in await after.both()} == {503}
        assert not switching.done()
        assert tokens(await after.post(after.decode, body)) == [wanted]
        await switching

        assert tokens((await before.both())[1]) == [wanted]
        body = await before.computed()
        assert tokens(await before.post(before.decode, body)) == [wanted]

    run(work)
    assert json.loads(httpx.get(one.url + "/integrity", timeout=60).text)["problems"] == []


def test_a_computed_prompt_that_no_decode_takes_keeps_its_prefill_in_its_role_for_a_moment_only(
    made: Deployment, one: Switched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the time of its request, which is ten minutes."""
    monkeypatch.setattr(prefill_scheduler, "STALE_S", 0.5)

    async def work(client: httpx.AsyncClient) -> None:
        await one.switch(Role.PREFILL)
        router = Router(client, one.url, url(made, Role.DECODE), BOOTSTRAP)
        body = await router.computed()
        await one.switch(Role.DECODE)
        late = await router.post(router.decode, body)
        assert late.status_code == 503, late.text

    run(work)


@pytest.mark.parametrize("style", ["at once", "prefill first"])
def test_of_two_decodes_in_one_room_one_has_the_answer_and_the_other_a_typed_error(
    made: Deployment, one: Switched, style: str
) -> None:
    """No router does it, and a client may."""
    wanted, port = expected(made), of(made, Role.PREFILL).config.bootstrap_port
    decodes = (one.url, url(made, Role.DECODE))

    async def work(client: httpx.AsyncClient) -> None:
        router = Router(client, url(made, Role.PREFILL), "", port)
        for _ in range(8):
            legs = []
            body = ASK | router.address | {"bootstrap_room": secrets.randbelow(2**62) + 1}
            if style == "prefill first":
                body = await router.computed()
            else:
                legs = [router.post(router.prefill, body)]
            *first, one_answer, other = await asyncio.gather(
                *legs, *(router.post(decode, body) for decode in decodes)
            )
            assert all(answer.status_code == 200 for answer in first)
            good, bad = sorted((one_answer, other), key=lambda answer: answer.status_code)
            assert tokens(good) == [wanted]
            assert bad.status_code >= 400, bad.text
            assert bad.json()["error"]["code"] in ("TRANSFER_FAILED", "INVALID_REQUEST")

    run(work)


def run(work: Any) -> None:
    async def whole() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await work(client)

    asyncio.run(whole())
