"""`/dashboard`: its page, its events and timelines, who may see them, and that nothing runs unseen."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from frontend_rig import DEADLINE_S, FakeBackend, Running, serve

from segue.cli.commands.top_command import looks
from segue.cli.main import main
from segue.kv.errors import ConfigError, PeerLost, SegueError, Starting
from segue.kv.ids import Role, new_incarnation
from segue.server.fleet.life import DatedRecord, Life
from segue.server.fleet.operator import Row
from segue.server.frontend import dashboard
from segue.server.frontend.dashboard import Dashboard
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.messages.records import Records, RequestRecord
from segue.server.observe.metrics import Metrics

KEY = "the-key-of-the-tests"


class Fleet:
    """A fleet without replicas. `operators` are open now and `opened` were; `asked` counts rounds of
    questions, `left` operators that are closed. While `hold` is set, `questions` wait for it."""

    def __init__(self) -> None:
        self.records = Records()
        self.membership = SimpleNamespace(name="frontend 0123abcd", replicas={})
        self.can_serve = self.proven = False
        self.in_flight = 3
        self.operators = self.opened = 0
        self.hold: asyncio.Event | None = None
        self.questions: list[str] = []
        self.calls: list[RequestRecord] = []
        self.asked = threading.Semaphore(0)
        self.left = threading.Semaphore(0)
        self.trouble: SegueError | None = None
        self.rows: list[Row] = []
        self.broken = False

    def live(self, count: int, tenant: str = "") -> list[RequestRecord]:
        if self.broken:
            raise RuntimeError("a bug")
        return [call for call in self.calls if tenant in ("", call.tenant)]

    def explain(self, request_id: str) -> list[RequestRecord]:
        return self.records.find(request_id)

    def lacking(self) -> SegueError:
        return Starting("nobody is here")

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[Any]:
        self.operators += 1
        self.opened += 1
        try:
            yield SimpleNamespace(ps=self.ps, explain=self.asked_to_explain)
        finally:
            self.operators -= 1
            self.left.release()

    async def ps(self) -> list[Row]:
        self.asked.release()
        if self.trouble is not None:
            raise self.trouble
        return self.rows

    async def asked_to_explain(self, request_id: str) -> Life:
        self.questions.append(request_id)
        if self.hold is not None:
            await self.hold.wait()
        known = RequestRecord(request_id=request_id, where="frontend http", began=1.0, seconds=2.0)
        parts = [DatedRecord(at_s=0.0, record=known)] if request_id == "known/1" else []
        return Life(request_id, parts, ["decode x: did not answer"])


def make(fleet: Fleet, metrics: Metrics) -> Dashboard:
    return Dashboard(fleet, metrics, model="tiny", open_operator=fleet.operator)  # type: ignore[arg-type]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(dashboard, "LOOK_S", 0.05)
    return Fleet()


@pytest.fixture
def watched(backend: FakeBackend, tokenizer: ModelTokenizer, fleet: Fleet) -> Iterator[Running]:
    with serve(backend, tokenizer, dashboard=partial(make, fleet)) as running:
        yield running


def test_a_viewer_gets_looks_and_its_leaving_ends_them(watched: Running, fleet: Fleet) -> None:
    for name, role in (("call", "http"), ("call-0", "frontend")):
        began = time.monotonic() - 60
        fleet.records.put(
            RequestRecord(
                request_id=name, where="", role=role, began=began, seconds=1.0, facts={"status": 200}
            )
        )
    views = looks(watched.url, {})
    first, second = next(views), next(views)
    assert (first.model, first.frontend, first.answering) == ("tiny", "frontend 0123abcd", 3)
    assert (first.ready, first.reason) == (False, "nobody is here")
    assert [(request.request_id, request.what) for request in first.requests] == [("call", "HTTP 200")]
    assert second.uptime_s > first.uptime_s
    assert 0 == first.window_s < second.window_s < 60
    assert fleet.asked.acquire(timeout=DEADLINE_S)
    views.close()
    assert fleet.left.acquire(timeout=DEADLINE_S)
    # Nothing asks any more, and the next viewer is served as the first was.
    again = looks(watched.url, {})
    assert next(again).model == "tiny"
    again.close()


def test_several_viewers_share_one_look(watched: Running, fleet: Fleet) -> None:
    some = [looks(watched.url, {}) for _ in range(3)]
    assert len({next(views).model for views in some}) == 1
    assert fleet.asked.acquire(timeout=DEADLINE_S)
    assert fleet.operators == 1
    for views in some:
        views.close()
    assert fleet.left.acquire(timeout=DEADLINE_S)
    assert not fleet.operators


def test_a_registry_that_is_away_is_said_and_ends_nothing(watched: Running, fleet: Fleet) -> None:
    fleet.trouble = PeerLost("the registry is away")
    views = looks(watched.url, {})
    assert any("the registry is away" in view.trouble for view, _ in zip(views, range(5), strict=False))
    fleet.trouble = None
    assert any(view.trouble == "" for view, _ in zip(views, range(200), strict=False))
    views.close()


def test_frontends_that_instances_know_are_shown(watched: Running, fleet: Fleet) -> None:
    name = new_incarnation()
    sight = SimpleNamespace(frontends=[name], pairs=[])
    row = partial(SimpleNamespace, role=Role.PREFILL, instance="i", dp_rank=0)
    fleet.rows = [row(sight=sight), row(sight=None)]  # type: ignore[list-item]
    views = looks(watched.url, {})
    assert any(view.frontends == [str(name)[:8]] for view, _ in zip(views, range(200), strict=False))
    views.close()


def test_a_viewer_that_reads_nothing_is_cut(
    watched: Running, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "STALL_S", 0.2)
    fleet.membership.name = "x" * 2**21
    with socket.create_connection(("127.0.0.1", watched.port)) as silent:
        silent.sendall(b"GET /dashboard/events HTTP/1.1\r\nhost: x\r\n\r\n")
        assert fleet.left.acquire(timeout=DEADLINE_S)


def test_a_bug_in_a_look_is_said_to_its_viewers(watched: Running, fleet: Fleet) -> None:
    fleet.broken = True
    with pytest.raises(SegueError, match="a bug"):
        next(looks(watched.url, {}))
    fleet.broken = False
    views = looks(watched.url, {})
    assert next(views).model == "tiny"
    views.close()


def test_one_viewer_too_many_is_refused(watched: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_VIEWERS", 2)
    all_of_them = [looks(watched.url, {}) for _ in range(2)]
    for views in all_of_them:
        next(views)
    with pytest.raises(SegueError, match=r"429.*2 viewers"):
        next(looks(watched.url, {}))
    for views in all_of_them:
        views.close()


def test_the_frontends_end_ends_the_streams(
    backend: FakeBackend, tokenizer: ModelTokenizer, fleet: Fleet
) -> None:
    with serve(backend, tokenizer, dashboard=partial(make, fleet)) as running:
        views = looks(running.url, {})
        next(views)
    assert len(list(views)) <= 2, "a look may be on its way"
    assert not fleet.operators


def test_a_timeline_is_what_explain_knows(watched: Running) -> None:
    answer = watched.http.get(f"{watched.url}/dashboard/requests/known/1")
    life = msgspec.json.decode(answer.content, type=Life)
    assert (answer.status_code, life.parts[0].record.seconds) == (200, 2.0)
    assert life.silent == ["decode x: did not answer"]
    answer = watched.http.get(f"{watched.url}/dashboard/requests/unknown")
    assert answer.status_code == 404
    assert "no process knows the request 'unknown'" in answer.json()["error"]["message"]


def test_many_timelines_at_once_share_one_operator_and_no_more_than_eight_ask(
    watched: Running, fleet: Fleet
) -> None:
    fleet.hold = asyncio.Event()
    urls = [f"{watched.url}/dashboard/requests/known/1" for _ in range(40)]
    with ThreadPoolExecutor(len(urls)) as threads:
        answers = [threads.submit(httpx.get, url, timeout=DEADLINE_S) for url in urls]
        refused = [done.result() for done in islice(as_completed(answers), 32)]
        assert (len(fleet.questions), fleet.opened) == (8, 1)
        watched.loop.call_soon_threadsafe(fleet.hold.set)
    assert {answer.status_code for answer in refused} == {429}
    assert all(answer.headers["retry-after"] for answer in refused)
    assert "8 timelines are asked for already" in refused[0].json()["error"]["message"]
    assert sorted(done.result().status_code for done in answers) == [200] * 8 + [429] * 32
    assert fleet.left.acquire(timeout=DEADLINE_S)
    assert not fleet.operators


def test_a_name_that_no_request_can_have_is_refused_before_anybody_is_asked(
    watched: Running, fleet: Fleet
) -> None:
    answer = watched.http.get(f"{watched.url}/dashboard/requests/{'(' * 60_000}")
    assert answer.status_code == 400
    assert "at most 160 characters, not 60000" in answer.json()["error"]["message"]
    assert (fleet.questions, fleet.opened) == ([], 0)


def test_with_several_keys_each_sees_its_own_requests_and_an_operator_all(
    backend: FakeBackend, tokenizer: ModelTokenizer, fleet: Fleet
) -> None:
    lost = PeerLost("the prompt of key 1").info
    for tenant, error in (("key 1", lost), ("key 2", None)):
        one = RequestRecord(
            request_id=f"of {tenant}",
            where="frontend http",
            role="http",
            began=1.0,
            seconds=1.0,
            facts={"status": 200},
            error=error,
            tenant=tenant,
        )
        both = msgspec.structs.replace(one, request_id="both")
        fleet.records.put(one)
        fleet.records.put(both)
        facts = {"prompt_tokens": 1, "output_tokens": 1}
        fleet.calls.append(msgspec.structs.replace(one, request_id=f"live {tenant}", facts=facts))
    keys = ("first", "second", "the-operator")
    shown: dict[str, list[str]] = {}
    with serve(backend, tokenizer, keys=keys, operators=keys[2:], dashboard=partial(make, fleet)) as running:
        for _ in range(2):  # two finished ones count as errors
            running.door.metrics.finished("chat", lost.code)

        def timeline(key: str, name: str) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return running.http.get(f"{running.url}/dashboard/requests/{name}", headers=headers)

        views = {key: looks(running.url, {"Authorization": f"Bearer {key}"}) for key in keys}
        for key, each in views.items():
            view = next(each)
            shown[key] = sorted(request.request_id for request in view.requests)
            [error] = view.errors
            assert (error.count, "key 1" in error.text) == (2, key != "second")
        for each in views.values():
            each.close()
        assert timeline("first", "of%20key%202").status_code == 404
        assert timeline("first", "known/1").status_code == 404
        own = msgspec.json.decode(timeline("second", "both").content, type=Life)
        assert [part.record.tenant for part in own.parts] == ["key 2"]
        assert fleet.questions == [], "no leader is asked"
        assert timeline("the-operator", "known/1").status_code == 200
    assert shown["first"] == ["both", "live key 1", "of key 1"]
    assert shown["second"] == ["both", "live key 2", "of key 2"]
    assert set(shown["the-operator"]) == {*shown["first"], *shown["second"]}


def test_the_page_runs_its_own_script_alone(watched: Running) -> None:
    answer = watched.http.get(f"{watched.url}/dashboard")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert "default-src 'none'; connect-src 'self'; frame-ancestors 'none'" in policy
    # It takes nothing from elsewhere; the name of SVG's elements is no address.
    addresses = set(re.findall(r"https?://[^\"'\s]+", answer.text))
    assert addresses == {"http://www.w3.org/2000/svg"}


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()}


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/requests/known/1"])
def test_a_browser_shows_the_key_as_a_password(
    path: str, backend: FakeBackend, tokenizer: ModelTokenizer, fleet: Fleet
) -> None:
    with serve(backend, tokenizer, keys=(KEY,), dashboard=partial(make, fleet)) as running:
        url = f"{running.url}{path}"
        refused = running.http.get(url)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        for wrong in ("", "x", KEY[:-1], f"{KEY}x"):
            assert running.http.get(url, headers=basic(wrong)).status_code == 401
        assert running.http.get(url, headers={"Authorization": "Basic not-base-64!"}).status_code == 401
        assert running.http.get(url, headers=basic(KEY)).status_code == 200
        assert running.http.get(url, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        # The rest of the server takes no password.
        models = running.http.get(f"{running.url}/v1/models", headers=basic(KEY))
        assert models.status_code == 401
        assert models.headers["www-authenticate"] == "Bearer"
        with pytest.raises(SegueError, match="401"):
            next(looks(running.url, {}))
        views = looks(running.url, {"Authorization": f"Bearer {KEY}"})
        assert next(views).model == "tiny"
        views.close()


def test_top_prints_one_look(watched: Running, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", watched.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "segue tiny  not ready: nobody is here" in shown
    assert "3 generations, 0 waiting" in shown


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("http://127.0.0.1:1", PeerLost, "cannot be read"),
        ("127.0.0.1:8000", ConfigError, "is no URL of a frontend"),
        ("ftp://127.0.0.1", ConfigError, "is no URL of a frontend"),
    ],
)
def test_a_wrong_address_of_a_frontend_is_said(url: str, error: type[SegueError], text: str) -> None:
    with pytest.raises(error, match=text):
        next(looks(url, {}))


def test_another_servers_answer_is_said(door: Running) -> None:
    with pytest.raises(SegueError, match=r"404.*there is no /dashboard/events"):
        next(looks(door.url, {}))
