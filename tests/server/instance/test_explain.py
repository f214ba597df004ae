"""`segue explain`: the life of a request from both sides' records, behind a real frontend."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Running, deployment
from killable import Cluster, cluster, save_tokenizer

from segue.cli.main import main
from segue.kv.ids import Role
from segue.server.fleet.operator import Operator
from segue.server.instance.leader import FromFrontend
from segue.server.messages.control import Cancel, Explain

BODY = {"prompt": list(range(3, 43)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
VOCAB = 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("explained")
    save_tokenizer(made, VOCAB)
    return made


@pytest.fixture
def made(folder: Path) -> Iterator[Cluster]:
    with cluster(folder, Role.PREFILL, Role.DECODE) as running:
        yield running


def ask(made: Cluster, request_id: str, status: int = 200, **body: Any) -> Any:
    content = json.dumps({"model": "tiny", **BODY, **body})
    answer = made.http.post("/v1/completions", content=content, headers={"x-request-id": request_id})
    assert answer.status_code == status, answer.text
    return answer.json()


def explain(made: Cluster, capsys: pytest.CaptureFixture[str], request_id: str) -> tuple[Any, str]:
    """Its life as JSON and as text."""
    words = ["explain", request_id, "--registry", made.url]
    assert main([*words, "--json"]) == 0
    life = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    return life, capsys.readouterr().out


def of(life: Any, where: str) -> list[Any]:
    return [part for part in life["parts"] if part["record"]["where"].startswith(where)]


def samples(life: Any) -> list[Any]:
    return [part for part in of(life, "frontend") if part["record"]["where"] != "frontend http"]


def steps(part: Any) -> list[str]:
    return [name for name, *_ in part["record"]["steps"]]


def test_both_sides_tell_every_phase_and_what_was_handed_over(
    made: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(made, "plain")
    ask(made, "plainer")
    life, text = explain(made, capsys, "plain")
    assert life["silent"] == []
    [http], [sample] = of(life, "frontend http"), samples(life)
    [p], [d] = of(life, "prefill"), of(life, "decode")
    assert steps(http) == ["read completions", "generate"]
    assert steps(sample) == ["place", "attempt", "answer"]
    assert steps(p) == ["queue", "bootstrap", "queue", "prefill", "in_flight"]
    assert steps(d) == ["queue", "reserve", "transfer", "ready", "decode"]
    assert p["record"]["facts"]["handed_bytes"] == d["record"]["facts"]["handed_bytes"] > 0
    assert d["record"]["facts"]["output_tokens"] == 4
    assert p["record"]["room"] == d["record"]["room"] == sample["record"]["room"]
    assert http["at_s"] == 0.0 <= sample["at_s"] <= p["at_s"] <= http["record"]["seconds"]
    assert p["at_s"] == d["at_s"]
    why = sample["record"]["steps"][1][2]
    assert "prefill: round_robin, of 1; decode: round_robin of 1" in why
    for word in ("request plain", "prefill ", "decode ", "transfer", "handed_bytes", "status 200"):
        assert word in text
    assert "plainer" not in text


def test_a_stop_string_is_a_success_on_both_sides(made: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"prompt": [3, 4, 5], "max_tokens": 32}
    whole = ask(made, "whole", **asked)["choices"][0]["text"]
    stop = whole[0]
    [decode] = made.by_role(Role.DECODE)
    leader, decoding = decode.instance.leader, made.steps[decode.instance.me]

    def until_cancelled() -> None:
        """The frontend has heard enough tokens: wait, in the middle of a step, for its word."""
        seen = [leader.inbox.get(timeout=60)]
        while not (isinstance(seen[-1], FromFrontend) and isinstance(seen[-1].message, Cancel)):
            seen.append(leader.inbox.get(timeout=60))
        for item in seen:
            leader.inbox.put(item)

    decoding.act, decoding.at = until_cancelled, decoding.count + 28
    choice = ask(made, "stopped", stop=stop, **asked)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    decode.ask()  # its leader has handled the word by then
    life, text = explain(made, capsys, "stopped")
    assert {part["record"]["where"].split()[0] for part in life["parts"]} == {"frontend", "prefill", "decode"}
    assert [part["record"].get("error") for part in life["parts"]] == [None] * len(life["parts"])
    [worker], [sample] = of(life, "decode"), samples(life)
    assert worker["record"].get("ended", True)
    assert worker["record"]["facts"]["output_tokens"] < 32
    assert sample["record"]["facts"]["output_tokens"] <= worker["record"]["facts"]["output_tokens"]
    assert "ABORTED" not in text


def test_a_request_that_was_placed_twice_shows_both_attempts_and_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(folder, Role.PREFILL, Role.DECODE, Role.DECODE) as made:
        decodes = made.by_role(Role.DECODE)
        died: list[Running] = []

        def kill(running: Running) -> None:
            for other in decodes:
                made.steps[other.instance.me].at = None
            died.append(running)
            made.kill(running)

        for running in decodes:
            steps_ = made.steps[running.instance.me]
            steps_.act, steps_.at = (lambda running=running: kill(running)), steps_.count + 2
        ask(made, "twice", max_tokens=12)
        life, text = explain(made, capsys, "twice")
        [sample] = samples(life)
        assert steps(sample) == ["place", "attempt", "answer", "place", "attempt", "answer"]
        again = sample["record"]["steps"][3][2]
        assert again.startswith("continue after PEER_LOST at decode")
        assert "1 avoided that failed before" in sample["record"]["steps"][4][2]
        assert len(of(life, "prefill")) == 2
        [second] = of(life, "decode")
        assert second["record"]["attempt"] == 1
        assert second["at_s"] > of(life, "prefill")[0]["at_s"]
        assert [who.split()[1] for who in life["silent"]] == [died[0].instance.me.incarnation[:8]]
        assert f"no answer from decode {died[0].instance.me}" in text


@pytest.mark.parametrize(("side", "other"), [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)])
def test_a_request_that_failed_on_a_side_names_it_on_both(
    made: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    side: Role,
    other: Role,
) -> None:
    [running] = made.by_role(side)
    broken = made.steps[running.instance.me]

    def fails(*_: object) -> None:
        raise RuntimeError("no more")

    if side is Role.PREFILL:
        broken.act, broken.at = fails, broken.count + 1
    else:  # in its first step it would have what it needs of prefill already
        monkeypatch.setattr(running.engine, "open", fails)
    error = ask(made, "failed", 500)["error"]
    assert "no more" in error["message"]
    life, text = explain(made, capsys, "failed")
    [mine], [theirs] = of(life, side), of(life, other)
    name = f"{side} {running.instance.me}"
    assert mine["record"]["error"]["origin"] == name
    assert theirs["record"]["error"]["code"] == mine["record"]["error"]["code"] == "INTERNAL"
    for part in of(life, "frontend"):
        assert part["record"]["error"]["origin"] == name
    assert text.count(f"ended with INTERNAL by {name}") >= 3


def test_a_request_that_waited_shows_where(made: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    [p] = made.by_role(Role.PREFILL)
    blocked, go = threading.Event(), threading.Event()
    held = made.steps[p.instance.me]

    def hold() -> None:
        blocked.set()
        assert go.wait(60)

    held.act, held.at = hold, held.count + 1
    first = threading.Thread(target=ask, args=(made, "first"))
    first.start()
    assert blocked.wait(60)
    second = threading.Thread(target=ask, args=(made, "second"), kwargs={"prompt": list(range(50, 90))})
    second.start()
    [d] = made.by_role(Role.DECODE)
    until = time.monotonic() + 60
    while len(d.instance.scheduler.admission.requests) < 2:
        assert time.monotonic() < until
    released = time.monotonic()
    go.set()
    for thread in (first, second):
        thread.join(60)
    life, _ = explain(made, capsys, "second")
    [part] = of(life, "prefill")
    # The test and the instance share a clock.
    began = {name: part["record"]["began"] + at_s for name, at_s, *_ in part["record"]["steps"]}
    assert began["prefill"] >= released
    [said] = [text for name, _, *text in part["record"]["steps"] if name == "prefill"]
    assert said == ["chosen of 1 waiting, 0 of them older; priority 0"]
    [part] = of(life, "decode")
    seen = {name: at_s for name, at_s, *_ in part["record"]["steps"]}
    assert seen["ready"] - seen["reserve"] > 0


def test_what_goes_on_is_told_so_far_and_a_silent_frontend_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Operator.ask

    async def ask(self: Operator, record: Any, where: Any, question: Explain, done: Any, _: float) -> Any:
        # The frontend answers nothing; the instances may take their time.
        return await asked(self, record, where, question, done, 0.3 if question.frontend else 60.0)

    monkeypatch.setattr(Operator, "ask", ask)
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        made.front.submit("held", list(range(9)), p, d, only=d)
        made.has(d)
        words = ["explain", "held", "--registry", f"http://127.0.0.1:{made.registry.port}"]
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "goes on, so far" in text
        assert "since its own arrival" in text
        assert f"no answer from frontend {made.front.me.incarnation[:8]}" in text
        made.front.cancel("held", d)
        words[1] = "unheard"
        assert main(words) == 1
        assert "no process knows the request 'unheard'" in capsys.readouterr().err
