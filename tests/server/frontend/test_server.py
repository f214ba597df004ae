"""The frontend as a process would run it: port, canary, drain."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fleet_rig import SECRET, FakeRegistry, Leader
from frontend_rig import CONTEXT

from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.frontend.frontend_process import run_frontend
from segue.server.frontend.http_server import bind
from segue.server.frontend.keys import ApiKeys
from segue.server.observe.metrics import Metrics
from segue.server.settings.commands import FrontendConfig
from segue.server.settings.shared_config import AnswersConfig, ClientsConfig, LimitsConfig

NO_KEYS = ApiKeys(())
SHORT_DRAIN = LimitsConfig(drain_s=0.1)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


async def frontend_of(
    folder: Path,
    registry: FakeRegistry,
    stop: asyncio.Event,
    *,
    policy: str = "total_tokens",
    on_listening: Callable[[str], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
    keys: ApiKeys = NO_KEYS,
    **kw: Any,
) -> None:
    """A frontend over a fleet, as `segue frontend` puts them together."""
    kw.setdefault("limit", LimitsConfig(drain_s=60))
    config = FrontendConfig(registry="http://127.0.0.1:1", port=0, **kw)
    metrics = Metrics()
    fleet = Fleet(
        registry,
        FleetSettings(served_model="tiny", policy=policy),
        secret=SECRET,
        limits=config.limit.limits(),
        metrics=metrics,
    )
    await run_frontend(
        config,
        fleet,
        metrics,
        stop,
        model_folder=folder,
        served_model="tiny",
        keys=keys,
        on_listening=on_listening,
        on_ready=on_ready,
    )


def test_a_port_in_use_and_a_broken_folder_are_configuration_errors(
    model_folder: Path, tmp_path: Path
) -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} .* in use"):
        bind("127.0.0.1", port)
    sock.close()
    with pytest.raises(ConfigError, match="the HTTP server cannot listen"):
        bind("192.0.2.1", 0)

    async def start(folder: Path, **kw: Any) -> None:
        await frontend_of(folder, FakeRegistry(), asyncio.Event(), **kw)

    with pytest.raises(ConfigError, match="model folder"):
        asyncio.run(start(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no placement policy"):
        asyncio.run(start(model_folder, policy="best"))


def test_the_model_s_sampling_defaults_are_read_only_where_they_are_asked_for(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text("{")

    async def start(whose: str) -> None:
        stop = asyncio.Event()
        answers = AnswersConfig(sampling_defaults=whose)
        async with asyncio.timeout(60):
            await frontend_of(
                folder, FakeRegistry(), stop, on_listening=lambda _url: stop.set(), answers=answers
            )

    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        asyncio.run(start("model"))
    asyncio.run(start("openai"))


@pytest.mark.slow
def test_ready_after_the_canary_then_serving_then_a_drain(model_folder: Path) -> None:
    async def main() -> None:
        registry, stop = FakeRegistry(), asyncio.Event()
        urls: asyncio.Queue[str] = asyncio.Queue()
        ready: asyncio.Queue[str] = asyncio.Queue()
        frontend = asyncio.create_task(
            frontend_of(model_folder, registry, stop, on_listening=urls.put_nowait, on_ready=ready.put_nowait)
        )
        async with asyncio.timeout(120):
            url = await urls.get()
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                assert (await http.get("/health")).status_code == 200
                answer = await http.get("/ready")
                assert answer.status_code == 503
                assert "starting" in answer.json()["reason"]
                assert "waiting for prefill and decode" in answer.json()["reason"]
                early = await http.post("/v1/chat/completions", json=CHAT)
                assert early.status_code == 503
                assert early.headers["retry-after"] == "1"
                assert early.json()["error"]["code"] == "STARTING"
                assert "is starting" in early.json()["error"]["message"]
                models = (await http.get("/v1/models")).json()
                assert models["data"][0]["max_model_len"] == CONTEXT
                prefill, decode = Leader(Role.PREFILL), Leader(Role.DECODE)
                for leader in (prefill, decode):
                    registry.put(await leader.start())
                assert await ready.get() == url
                assert (await http.get("/ready")).status_code == 200
                assert decode.submits[0].request.request_id.startswith("canary")
                assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 100
                answer = await http.post("/v1/chat/completions", json=CHAT)
                assert answer.json()["usage"]["completion_tokens"] == 3
                metrics = (await http.get("/metrics")).text
                assert 'segue_replicas{role="decode"} 1.0' in metrics
                assert "segue_pages{" in metrics

                # A stream that runs while the frontend drains is finished; nothing new is taken.
                decode.behave = "one"
                async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as s:
                    lines = s.aiter_lines()
                    assert "role" in await anext(lines)
                    stop.set()
                    refused = await http.post("/v1/chat/completions", json=CHAT)
                    assert refused.status_code == 503
                    assert refused.json()["error"]["code"] == "DRAINING"
                    assert refused.headers["retry-after"] == "1"
                    assert (await http.get("/ready")).status_code == 503
                    running = decode.submits[-1].request.request_id
                    finish(decode, running)
                    rest = [line async for line in lines if line]
                assert rest[-1] == "data: [DONE]"
                assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            await frontend
        for leader in (prefill, decode):
            await leader.node.close()

    asyncio.run(main())


def test_a_frontend_with_a_delay_is_not_ready_but_answers_until_it_is_over(model_folder: Path) -> None:
    async def main() -> None:
        registry, stop = FakeRegistry(), asyncio.Event()
        ready: asyncio.Queue[str] = asyncio.Queue()
        delayed = ClientsConfig(shutdown_delay_s=3600)
        frontend = asyncio.create_task(
            frontend_of(model_folder, registry, stop, on_ready=ready.put_nowait, clients=delayed)
        )
        async with asyncio.timeout(120):
            prefill, decode = Leader(Role.PREFILL), Leader(Role.DECODE)
            for leader in (prefill, decode):
                registry.put(await leader.start())
            async with httpx.AsyncClient(base_url=await ready.get(), timeout=60) as http:
                stop.set()
                while (answer := await http.get("/ready")).status_code == 200:
                    pass
                assert "ends soon" in answer.json()["reason"]
                assert "segue_ready 0.0" in (await http.get("/metrics")).text
                answer = await http.post("/v1/chat/completions", json=CHAT)
                assert answer.json()["usage"]["completion_tokens"] == 3
        frontend.cancel()  # as the second signal does
        await asyncio.gather(frontend, return_exceptions=True)
        for leader in (prefill, decode):
            await leader.node.close()

    asyncio.run(main())


@pytest.mark.parametrize(("delay_s", "serves"), [(0.05, True), (3600.0, False)])
def test_a_delay_ends_and_a_frontend_that_never_was_ready_has_none(
    model_folder: Path, delay_s: float, serves: bool
) -> None:
    async def main() -> None:
        registry, stop = FakeRegistry(), asyncio.Event()
        leaders = [Leader(Role.PREFILL), Leader(Role.DECODE)] if serves else []
        told = {"on_ready" if serves else "on_listening": lambda _url: stop.set()}
        for leader in leaders:
            registry.put(await leader.start())
        async with asyncio.timeout(120):
            clients = ClientsConfig(shutdown_delay_s=delay_s)
            await frontend_of(model_folder, registry, stop, clients=clients, **told)
        for leader in leaders:
            await leader.node.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("127.0.0.1", (), False)],
)
def test_an_open_door_is_warned_of_and_its_url_can_be_used(
    model_folder: Path, caplog: pytest.LogCaptureFixture, host: str, keys: tuple[str, ...], warned: bool
) -> None:
    async def main() -> None:
        stop: asyncio.Event = asyncio.Event()
        urls: asyncio.Queue[str] = asyncio.Queue()
        made = frontend_of(
            model_folder,
            FakeRegistry(),
            stop,
            on_listening=urls.put_nowait,
            host=host,
            keys=ApiKeys(keys),
        )
        frontend = asyncio.create_task(made)
        async with asyncio.timeout(120):
            url = await urls.get()
            assert url.startswith("http://127.0.0.1:")
            async with httpx.AsyncClient(base_url=url) as http:
                assert (await http.get("/health")).status_code == 200
                assert (await http.get("/v1/models")).status_code == (401 if keys else 200)
            stop.set()
            await frontend

    asyncio.run(main())
    found = [r for r in caplog.records if "without an API key" in r.getMessage()]
    assert len(found) == warned


def finish(leader: Leader, request_id: str) -> None:
    from segue.engine.request import FinishReason, Output
    from segue.server.messages.control import Outputs

    leader.session.send(
        Outputs([Output(request_id=request_id, position=1, token_ids=[6], finish=FinishReason.LENGTH)])
    )


def test_what_does_not_end_within_the_drain_time_is_ended(model_folder: Path) -> None:
    async def main() -> None:
        registry, stop = FakeRegistry(), asyncio.Event()
        ready: asyncio.Queue[str] = asyncio.Queue()
        frontend = asyncio.create_task(
            frontend_of(model_folder, registry, stop, on_ready=ready.put_nowait, limit=SHORT_DRAIN)
        )
        leader = Leader(Role.UNIFIED)
        async with asyncio.timeout(120):
            registry.put(await leader.start())
            async with httpx.AsyncClient(base_url=await ready.get(), timeout=60) as http:
                leader.behave = "hang"
                asked = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
                await leader.until(lambda: len(leader.submits) == 2)
                stop.set()
                answer = await asked
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "DRAINING"
            await frontend
        await leader.node.close()

    asyncio.run(main())
