"""`segue ps`, `drain` and `resume` on instances in one process, with real sessions and a real registry."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import LIMITS, VOCAB, Deployment, Running, deployment
from fleet_records import instance_record

from segue.cli.commands import operate_commands as operate
from segue.cli.main import main
from segue.kv.errors import DeadlineExceeded, ErrorCode, PeerLost, SegueError
from segue.kv.ids import Role, new_incarnation
from segue.kv.peers import PathSpeed
from segue.server.fleet.operator import Operator, operator
from segue.server.instance import instance_http as http
from segue.server.instance.instance_http import InstanceStatus
from segue.server.messages.operate import PairStatus, Status
from segue.server.observe.integrity_report import NodeState
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.settings.shared_config import TlsConfig
from segue.server.supervisor.local_deployments import announced_instance, runtime_folder
from segue_lab.sim.sim_engine import reference

PROMPT = list(range(40))


@pytest.fixture
def made() -> Iterator[Deployment]:
    with deployment(Role.PREFILL, Role.DECODE) as running:
        yield running


def url(made: Deployment) -> str:
    return f"http://127.0.0.1:{made.registry.port}"


def one(made: Deployment, role: Role) -> Running:
    [found] = [running for running in made.running if running.instance.config.role is role]
    return found


def name(running: Running) -> str:
    return running.instance.me.incarnation[:8]


def serve_one(made: Deployment, request: str) -> None:
    p, d = one(made, Role.PREFILL).instance, one(made, Role.DECODE).instance
    sampling = made.front.submit(request, PROMPT, p, d)
    assert made.front.tokens(request) == reference(PROMPT, sampling, VOCAB, 4)


async def listed(op: Operator, *, draining: bool) -> None:
    """Once the registry knows."""
    version = None
    while True:
        answer = await op._registry.instances(Role.DECODE, version, 60)
        if answer.instances[0].draining is draining:
            return
        assert answer.version != version, "the registry was not told"
        version = answer.version


def test_ps_shows_leaders_and_pairs_with_what_they_carried(
    made: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    for request in ("a", "b", "c"):
        serve_one(made, request)
    made.assert_comes_to_rest()
    assert main(["ps", "--registry", url(made)]) == 0
    text = capsys.readouterr().out
    assert "INSTANCE" in text
    assert name(one(made, Role.PREFILL)) in text
    assert "serving" in text
    assert main(["ps", "--registry", url(made), "--json"]) == 0
    rows = {row["role"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"prefill", "decode"}
    [pair] = rows["prefill"]["sight"]["pairs"]
    assert pair["peer"] == str(one(made, Role.DECODE).instance.me)
    assert (pair["transport"], pair["succeeded"], pair["failed"]) == ("shm", 3, 0)
    assert pair["nbytes"] > 0
    assert pair["bytes_per_s"] > 0
    assert rows["decode"]["sight"]["frontends"] == [made.front.me.incarnation]
    assert rows["decode"]["sight"]["load"]["pages_quarantined"] == 0


def test_what_has_carried_nothing_is_shown_no_speed() -> None:
    """Decode never knows one, and prefill none before the first write: 0.00 GB/s would be a wrong figure."""
    assert operate.pair_cells(PairStatus(peer="x", transport="shm"))[:3] == ("shm", "-", "-")
    carried = PairStatus(peer="x", transport="shm", bytes_per_s=2.5e9, nbytes=10**9)
    assert operate.pair_cells(carried)[:3] == ("shm", "2.50", "1.000")

    async def nothing() -> NodeState:
        raise NotImplementedError

    paths = {"idle": PathSpeed("shm"), "used": PathSpeed("tcp", 100, 2.0)}
    status = InstanceStatus({}, lambda: None, dict, lambda: True, nothing, lambda: paths)
    samples = [sample for family in http.StatusCollector(status).collect() for sample in family.samples]
    told = [s for s in samples if s.name == "segue_instance_path_bytes_per_second"]
    assert [(s.labels, s.value) for s in told] == [({"peer": "used", "transport": "tcp"}, 50.0)]


def test_a_drain_waits_for_what_runs_and_resume_takes_requests_again(made: Deployment) -> None:
    p, d = one(made, Role.PREFILL), one(made, Role.DECODE)
    # Decode alone hears of it: it stays until it is cancelled.
    made.front.submit("held", PROMPT, p.instance, d.instance, only=d.instance)
    made.has(d.instance)

    async def scenario() -> list[str]:
        states: list[str] = []
        async with operator(url(made), secret=None, limits=LIMITS.limits(), tls=None) as op:
            record = await op.named(name(d))

            def say(_where: ReplicaRecord, sight: Status) -> None:
                states.append(sight.state)
                if sight.state == "draining":
                    assert sight.load.waiting == 1
                    # New ones are refused, and nothing of what is there ends.
                    made.front.submit("late", PROMPT, p.instance, d.instance, only=d.instance)
                    [output] = made.front.wait("late")
                    assert output.error is not None
                    assert output.error.code is ErrorCode.DRAINING
                    assert "held" not in made.front.outputs
                    made.front.cancel("held", d.instance)

            await op.steer(record, draining=True, timeout_s=60, say=say)
            await listed(op, draining=True)
            [row] = [row for row in await op.ps() if row.role is Role.DECODE]
            assert row.sight is not None
            assert row.sight.state == "drained"
            await op.steer(record, draining=False, timeout_s=60, say=say)
            await listed(op, draining=False)
        return states

    assert asyncio.run(scenario()) == ["draining", "drained", "serving"]
    serve_one(made, "after")
    made.assert_comes_to_rest()


def test_a_drain_that_does_not_end_in_time_says_what_is_left(
    made: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    p, d = one(made, Role.PREFILL), one(made, Role.DECODE)
    made.front.submit("held", PROMPT, p.instance, d.instance, only=d.instance)
    made.has(d.instance)
    for timeout_s in ("0.3", "3", "30"):  # the longer ones if it is over before there was an answer
        assert main(["drain", name(d), "--registry", url(made), "--timeout", timeout_s]) == 1
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        if said.out:
            break
    assert "draining: running 0, waiting 1" in said.out
    assert f"is draining after {timeout_s} s: 1 requests are left" in said.err
    made.front.cancel("held", d.instance)
    assert main(["drain", name(d), "--registry", url(made)]) == 0
    assert "drained" in capsys.readouterr().out
    assert main(["resume", name(d), "--registry", url(made)]) == 0
    serve_one(made, "after")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of this test alone for what processes write about themselves."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MAINPID", raising=False)


def control(running: Running) -> str:
    return "{}:{}".format(*running.instance.plane.address)


def test_the_one_instance_here_is_drained_without_a_name(
    made: Deployment, runtime: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the settings that it was given, whatever the variables of its pod say."""
    monkeypatch.setenv("SEGUE_REGISTRY", "http://127.0.0.1:1")
    d = one(made, Role.DECODE)
    with announced_instance([control(d)], None, TlsConfig()):
        assert main(["drain", "--self"]) == 0
        assert f"decode {d.instance.me} drained" in capsys.readouterr().out
        for draining, service in ((0, "1"), (1, str(os.getpid()))):  # systemd names the service's process
            monkeypatch.setenv("MAINPID", service)
            assert main(["drain", "--self"]) == (0 if draining else 2)
    assert "here are: none" in capsys.readouterr().err
    assert main(["drain", "--self"]) == 2


def test_an_instance_here_that_is_too_busy_to_answer_is_asked_again(
    made: Deployment, runtime: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preStop hook has the whole grace period: the first attempts find no session, or lose theirs."""
    d = one(made, Role.DECODE)
    asked = Operator.ask
    failed: list[SegueError] = [PeerLost("left"), DeadlineExceeded("late")]

    async def ask(self: Operator, *question: Any) -> Any:
        if failed:
            raise failed.pop()
        return await asked(self, *question)

    monkeypatch.setattr(Operator, "ask", ask)
    monkeypatch.setattr(operate, "AGAIN_S", 0.01)
    with announced_instance([control(d)], None, TlsConfig()), socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["drain", "--self"]) == 0
        said = capsys.readouterr()
        assert f"decode {d.instance.me} drained" in said.out
        assert said.err.count("it is asked again") == 2
        deaf = f"127.0.0.1:{other.getsockname()[1]}"
        with announced_instance([deaf], None, TlsConfig()):
            assert main(["drain", "--self", "--timeout", "0.2"]) == 1
        assert "did not answer within 0.2 s" in capsys.readouterr().err


def test_the_time_until_an_instance_here_answers_is_part_of_its_drains(
    made: Deployment, runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a preStop hook takes up to twice its time, and the grace period of the pod is over before it."""
    d = one(made, Role.DECODE)
    instances, steer = Operator.instances, Operator.steer
    given = []

    async def late(self: Operator) -> Any:
        await asyncio.sleep(0.3)
        return await instances(self)

    async def noted(self: Operator, record: Any, *, timeout_s: float, **rest: Any) -> None:
        given.append(timeout_s)
        await steer(self, record, timeout_s=timeout_s, **rest)

    monkeypatch.setattr(Operator, "instances", late)
    monkeypatch.setattr(Operator, "steer", noted)
    with announced_instance([control(d)], None, TlsConfig()):
        assert main(["drain", "--self", "--timeout", "20"]) == 0
    assert given[0] <= 19.7


@pytest.mark.slow
def test_a_drain_of_the_instance_here_that_is_not_over_in_time_is_no_success(
    made: Deployment, runtime: None, capsys: pytest.CaptureFixture[str]
) -> None:
    p, d = one(made, Role.PREFILL), one(made, Role.DECODE)
    made.front.submit("held", PROMPT, p.instance, d.instance, only=d.instance)
    made.has(d.instance)
    with announced_instance([control(d)], None, TlsConfig()):
        assert main(["drain", "--self", "--timeout", "5"]) == 1
    said = capsys.readouterr()
    assert f"decode {d.instance.me} draining: running 0, waiting 1" in said.out
    assert re.search(r"is draining after [\d.]+ s: 1 requests are left", said.err)
    made.front.cancel("held", d.instance)


def test_of_several_instances_here_none_is_drained(
    made: Deployment, runtime: None, capsys: pytest.CaptureFixture[str]
) -> None:
    p, d = one(made, Role.PREFILL), one(made, Role.DECODE)
    with announced_instance([control(d)], None, TlsConfig()):
        [file] = runtime_folder().iterdir()
        second = file.read_text().replace(control(d), control(p))
        file.with_stem(f"{file.stem}0").write_text(second)
        assert main(["drain", "--self"]) == 2
    said = capsys.readouterr().err
    assert control(d) in said
    assert control(p) in said
    assert not any(running.instance.scheduler.admission.draining for running in made.running)


@pytest.mark.parametrize("words", [["drain"], ["drain", "--self", "aaaa"], ["resume", "--self"]])
def test_either_an_instance_is_named_or_it_is_the_one_here(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "INSTANCE" in capsys.readouterr().err


def test_an_instance_that_does_not_answer_is_a_row_that_says_so(
    made: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Operator.ask

    async def ask(self: Operator, record: Any, where: ReplicaRecord, *rest: Any) -> Any:
        *question, _ = rest  # the others may take their time, or they would be as silent on a starved machine
        return await asked(self, record, where, *question, 0.3 if where.port == port else 60.0)

    monkeypatch.setattr(Operator, "ask", ask)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        record = instance_record(new_incarnation(), port, served_model="test")
        made.io.call(_registered(made, record), 60)
        assert main(["ps", "--registry", url(made), "--json"]) == 0
        rows = {row["instance"]: row for row in json.loads(capsys.readouterr().out)}
        assert main(["ps", "--registry", url(made)]) == 0
        assert "no answer" in capsys.readouterr().out
    silent = rows.pop(record.incarnation)
    assert silent["sight"] is None
    assert "within 0.3 s" in silent["trouble"]
    assert all(row["sight"] is not None for row in rows.values())


async def _registered(made: Deployment, record: InstanceRecord) -> None:
    made.registry.store.register(record, 0)


async def test_who_has_another_secret_steers_nobody(made: Deployment, tmp_path: Path) -> None:
    secret = b"another secret than theirs"
    async with operator(url(made), secret=secret, limits=LIMITS.limits(), tls=None) as op:
        rows = await op.ps()
        assert len(rows) == 2
        assert all(row.sight is None and row.trouble for row in rows), rows
        record = await op.named(name(one(made, Role.DECODE)))
        with pytest.raises(Exception, match="secret"):
            await op.steer(record, draining=True, timeout_s=60)
    assert not one(made, Role.DECODE).instance.scheduler.admission.draining


def test_names_that_fit_none_or_several_are_refused(
    made: Deployment, runtime: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "zzzz", "--registry", url(made)]) == 1
    assert "no instance 'zzzz' is registered" in capsys.readouterr().err
    for too_short in ("", name(one(made, Role.DECODE))[:3]):
        assert main(["drain", too_short, "--registry", url(made)]) == 1
        assert f"no instance {too_short!r} is registered" in capsys.readouterr().err
    assert main(["drain", "zzzz", "--registry", url(made), "--timeout", "soon"]) == 2
    assert "--timeout must be a number of seconds" in capsys.readouterr().err
    assert main(["ps", "--registry", "http://127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["ps"]) == 2
