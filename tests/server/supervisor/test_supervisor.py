"""The supervisor over real processes that hold no model: order, signals, deaths, nothing left behind."""

import asyncio
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import supervised

from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.settings.commands import FrontendConfig, InstanceConfig
from segue.server.settings.kv_events_config import KVEventsConfig
from segue.server.settings.layers import argv
from segue.server.settings.ranks_config import RanksConfig
from segue.server.settings.shared_config import AccessConfig
from segue.server.supervisor import process_tree, restarts
from segue.server.supervisor.children import Child, ChildSpec
from segue.server.supervisor.process_tree import ProcessTree, ServeResult, Unit, missing, secret_fd
from segue.server.supervisor.restarts import Restarts
from segue.server.supervisor.supervisor import Supervisor, check_port

Announce = Callable[[Supervisor, str], None]


def stop_at_once(supervisor: Supervisor, url: str) -> None:
    supervisor.stop()


def run(journal: Path, announce: Announce = stop_at_once, **settings: Any) -> ServeResult:
    made: list[Supervisor] = []

    def make() -> Supervisor:
        made.append(supervised.make(journal, announce, **settings))
        return made[0]

    before = set(os.listdir("/proc/self/fd"))
    with asyncio.Runner(loop_factory=supervised.Ahead) as runner:
        outcome = runner.run(supervised.run(make))
    assert [c.name for c in made[0].children if c.process.returncode is None] == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    return outcome


def events(journal: Path, event: str) -> list[str]:
    """Names of the children to which `event` happened, in order."""
    return [line.split()[0] for line in journal.read_text().splitlines() if line.split()[1] == event]


def started(journal: Path, name: str) -> list[int]:
    """The processes that `name` was, in order."""
    return [
        int(pid) for pid in re.findall(rf"^{re.escape(name)} pid=(\d+)", journal.read_text(), re.MULTILINE)
    ]


def test_drain_takes_the_door_first_and_leaves_nobody(tmp_path: Path) -> None:
    urls: list[str] = []

    def announce(supervisor: Supervisor, url: str) -> None:
        urls.append(url)
        supervisor.stop()

    assert run(tmp_path / "j", announce, prefill=2) == ServeResult(0)
    assert urls == ["http://127.0.0.1:1"]
    left = events(tmp_path / "j", "left")
    assert left[0] == "frontend"
    assert sorted(left) == ["decode-0", "frontend", "prefill-0", "prefill-1"]
    # Nobody who computes was asked to leave before the door had closed.
    journal = (tmp_path / "j").read_text().splitlines()
    assert journal.index("frontend left") < min(i for i, x in enumerate(journal) if x.endswith("-0 asked"))


def test_unified_is_one_instance(tmp_path: Path) -> None:
    assert run(tmp_path / "j", unified=True) == ServeResult(0)
    assert sorted(events(tmp_path / "j", "left")) == ["frontend", "unified-0"]


def test_children_get_their_share_of_threads_and_no_variables_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEGUE_PORT", "9000")
    run(tmp_path / "j")
    text = (tmp_path / "j").read_text()
    assert dict(re.findall(r"(\S+) pid=\d+ threads=(\d+)", text)) == {
        "prefill-0": "2",
        "decode-0": "2",
        "frontend": "1",
    }
    assert set(re.findall(r"port=(\S+)", text)) == {"None"}


async def test_the_secret_is_an_inherited_file_and_nowhere_else(tmp_path: Path) -> None:
    supervisor = supervised.make(tmp_path / "j", stop_at_once)
    seen: list[InstanceConfig | FrontendConfig] = []
    supervisor.command = lambda role, config: seen.append(config) or ["x"]
    for spec, config in zip(supervised.specs(supervisor), seen, strict=True):
        assert spec.pass_fds == ((77, 78) if spec.role is Role.FRONTEND else (77,))
        assert config.secret_file == "/proc/self/fd/77"
        assert config.secret == b""


async def test_clients_keys_reach_the_frontend_as_a_file_and_nobody_else(tmp_path: Path) -> None:
    access = AccessConfig(api_key="hunter2-of-the-tests", client_order="none", prefix_cache_sharing="all")
    keys = ["hunter2-of-the-tests"]
    supervisor = supervised.make(tmp_path / "j", stop_at_once, keys=keys, access=access)
    supervisor.command = lambda role, config: argv(config)
    for spec in supervised.specs(supervisor):
        frontend = spec.role is Role.FRONTEND
        assert ("--api-key-file=/proc/self/fd/78" in spec.argv) is frontend
        assert ("--client-order=none" in spec.argv) is frontend
        assert ("--prefix-cache-sharing=all" in spec.argv) is frontend
        assert "hunter2" not in repr(spec.argv)
        assert "hunter2" not in repr(spec.environ)


async def test_each_leader_of_the_deployment_publishes_kv_events_at_ports_of_its_own(tmp_path: Path) -> None:
    events = KVEventsConfig(
        kv_events_port=5557, kv_events_replay_port=5600, kv_events_host="::1", kv_events_topic="kv"
    )
    ranks = RanksConfig(prefill_dp=2)
    supervisor = supervised.make(tmp_path / "j", stop_at_once, events=events, ranks=ranks, decode=2)
    supervisor.command = lambda role, config: argv(config)
    taken: dict[str, list[int]] = {}
    for spec in supervised.specs(supervisor):
        words = _settings(spec.argv)
        if spec.role is not Role.FRONTEND:
            assert (words["--kv-events-topic"], words["--kv-events-host"]) == ("kv", "::1")
            rank = int(words.get("--dp-rank", 0))  # which `KVPublisher` adds
            flags = ("--kv-events-port", "--kv-events-replay-port")
            taken[spec.name] = [int(words[flag]) + rank for flag in flags]
    assert taken == {
        "prefill-0.dp0": [5557, 5600],
        "prefill-0.dp1": [5558, 5601],
        "decode-0": [5559, 5602],
        "decode-1": [5560, 5603],
    }


def test_an_anonymous_file_is_read_by_its_owner_and_changed_by_nobody() -> None:
    with secret_fd(b"the secret") as fd:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert Path(f"/proc/self/fd/{fd}").read_bytes() == b"the secret"
        with pytest.raises(PermissionError):
            os.write(fd, b"x")


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        ("refuse", 2, "decode-0: the model is broken"),
        ("refuse-peer", 1, "decode-0: no"),
        (
            "crash",
            1,
            "decode-0 ended during the start with exit status 3; its last lines:\n"
            "    hello of decode-0\n    the last word",
        ),
        (
            "killed",
            1,
            "decode-0 ended during the start with signal 9 (SIGKILL): the host has most likely run out of "
            "memory; give a lower --kv-gib, fewer instances, or a --dtype with fewer bytes",
        ),
        (
            "bug",
            1,
            "decode-0: ValueError: not foreseen; its last lines:\n"
            "    hello of decode-0\n    Traceback\n    ValueError: not foreseen",
        ),
    ],
)
def test_a_child_that_cannot_start_ends_everything_with_its_reason(
    tmp_path: Path, behaviour: str, status: int, reason: str
) -> None:
    def never(supervisor: Supervisor, url: str) -> None:
        raise AssertionError("announced without decode")

    outcome = run(tmp_path / "j", never, behaviours={"decode-0": behaviour})
    assert outcome == ServeResult(status, reason)


def test_a_child_that_never_reports_is_named_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = {"prefill-0", "decode-0"}

    def told(text: str, *about: object) -> None:
        if text.startswith("event=ready"):
            loading.discard(str(about[0]))
            if not loading:
                supervised.move_on()

    monkeypatch.setattr(process_tree.log, "info", told)
    outcome = run(tmp_path / "j", behaviours={"frontend": "silent"})
    assert outcome == ServeResult(1, "frontend did not start within 60 s")


def test_a_death_is_loud_and_the_rest_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def announce(supervisor: Supervisor, url: str) -> None:
        victim = next(c for c in supervisor.children if c.name == "prefill-1")
        victim.signal(signal.SIGUSR1)
        # The service is told to stop only once the death has been seen: so it did go on.
        victim.exited.add_done_callback(lambda _: asyncio.get_running_loop().call_soon(supervisor.stop))

    how: dict[str, Any] = {"behaviours": {"prefill-1": "late-crash"}, "restart": "never"}
    assert run(tmp_path / "j", announce, prefill=2, **how) == ServeResult(0)
    assert "child=prefill-1 how='exit status 7'; it is not started again" in caplog.text
    assert len(started(tmp_path / "j", "prefill-1")) == 1
    assert "line='out of luck'" in caplog.text


def test_who_was_switched_is_named_and_counted_by_its_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    console = io.StringIO()

    def announce(supervisor: Supervisor, url: str) -> None:
        loop = asyncio.get_running_loop()
        old, switched = (
            next(c for c in supervisor.children if c.name == n) for n in ("prefill-0", "decode-1")
        )

        def look() -> None:
            if switched.role is Role.DECODE:
                loop.call_later(0.01, look)  # nobody is told
                return
            switched.signal(signal.SIGUSR1)
            old.exited.add_done_callback(lambda _: loop.call_soon(supervisor.stop))
            old.signal(signal.SIGKILL)

        switched.signal(signal.SIGUSR1)
        look()

    how: dict[str, Any] = {"behaviours": {"decode-1": "switched"}, "console": console, "restart": "never"}
    assert run(tmp_path / "j", announce, decode=2, **how) == ServeResult(0), "a prefill instance is left"
    assert "child=prefill-0 how='signal 9 (SIGKILL)'" in caplog.text
    assert "decode-1-as-prefill | what it says later" in console.getvalue()
    assert "decode-1   | hello of decode-1" in console.getvalue()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "frontend"])
def test_without_a_pair_the_service_ends_with_status_1_where_nothing_is_started_again(
    tmp_path: Path, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    def announce(supervisor: Supervisor, url: str) -> None:
        next(c for c in supervisor.children if c.name == victim).signal(signal.SIGKILL)

    outcome = run(tmp_path / "j", announce, restart="never")
    role = victim.removesuffix("-0")
    assert outcome == ServeResult(1, f"nothing can serve any more: no {role} is left")
    assert f"child={victim} how='signal 9 (SIGKILL)'" in caplog.text
    assert sorted(events(tmp_path / "j", "left")) == sorted({"prefill-0", "decode-0", "frontend"} - {victim})


@pytest.mark.parametrize("stubborn", ["decode-0", "frontend"])
def test_who_does_not_leave_in_time_is_killed_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: str
) -> None:
    """The others drain all the same, also those that are asked after it."""
    monkeypatch.setattr(process_tree, "MARGIN_S", 600.0)

    def announce(supervisor: Supervisor, url: str) -> None:
        beside = {"decode-0": "prefill-0"}.get(stubborn)  # who is asked together with it

        def look() -> None:
            others = [child for child in supervisor.children if child.name == beside]
            if stubborn in events(tmp_path / "j", "asked") and not any(child.alive for child in others):
                supervised.move_on()
            else:
                asyncio.get_running_loop().call_later(0.01, look)  # nobody is told

        supervisor.stop()
        look()

    outcome = run(tmp_path / "j", announce, behaviours={stubborn: "stubborn"})
    assert outcome.status == 1
    assert "not everything drained" in outcome.reason
    assert sorted(events(tmp_path / "j", "left")) == sorted(
        {"decode-0", "prefill-0", "frontend"} - {stubborn}
    )


def test_a_child_that_fails_on_its_way_out_is_not_a_clean_drain(tmp_path: Path) -> None:
    assert run(tmp_path / "j", behaviours={"prefill-0": "fail-on-leave"}).status == 1


def test_a_child_that_dies_while_the_frontend_drains_is_told_of_and_no_clean_drain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "j"

    def announce(supervisor: Supervisor, url: str) -> None:
        supervisor.stop()
        victim, door = child(supervisor, "decode-0"), child(supervisor, "frontend")
        when(lambda: "frontend" in events(journal, "asked"), lambda: victim.signal(signal.SIGKILL))
        victim.exited.add_done_callback(lambda _: door.signal(signal.SIGKILL))

    assert run(journal, announce, behaviours={"frontend": "stubborn"}).status == 1
    assert "event=died child=decode-0 how='signal 9 (SIGKILL)'" in caplog.text

    def clean(supervisor: Supervisor, url: str) -> None:
        """The frontend needs until decode is dead, and leaves well."""
        supervisor.stop()
        child(supervisor, "decode-0").signal(signal.SIGKILL)

    assert run(tmp_path / "k", clean).status == 1


def test_a_second_signal_ends_a_drain_at_once(tmp_path: Path) -> None:
    def announce(supervisor: Supervisor, url: str) -> None:
        supervisor.stop()
        asyncio.get_running_loop().call_later(0.05, supervisor.stop)

    # The default drain time is longer than this test may take.
    assert run(tmp_path / "j", announce, behaviours={"frontend": "stubborn"}).status == 1


def test_stop_while_starting_leaves_nobody(tmp_path: Path) -> None:
    made: list[Supervisor] = []

    def make() -> Supervisor:
        made.append(supervised.make(tmp_path / "j", stop_at_once, behaviours={"frontend": "silent"}))
        asyncio.get_running_loop().call_later(0.5, made[0].stop)
        return made[0]

    stopped = ServeResult(1, "stopped while loading: 3 processes ended; nothing was served")
    assert asyncio.run(supervised.run(make)) == stopped
    assert not any(c.alive for c in made[0].children)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            check_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        check_port("not-a-host.invalid", 8000)
    check_port("127.0.0.1", port)


def test_children_leave_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "j"
    command = [sys.executable, supervised.__file__, str(journal)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready http://127.0.0.1:1\n"
        pids = [int(pid) for pid in re.findall(r"pid=(\d+)", journal.read_text())]
        assert len(pids) == 3
        fds = [os.pidfd_open(pid) for pid in pids]
        process.kill()
    for fd in fds:  # a pidfd is readable once its process has ended
        assert select.select([fd], [], [], 60)[0], "a child outlived its supervisor"
        os.close(fd)
    assert sorted(events(journal, "left")) == ["decode-0", "frontend", "prefill-0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_the_status_is_0(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, supervised.__file__, str(tmp_path / "j")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == 0
    assert sorted(events(tmp_path / "j", "left")) == ["decode-0", "frontend", "prefill-0"]


class Tree(ProcessTree):
    """One without children."""

    def ready(self, urls: Sequence[tuple[Role, str]]) -> None: ...


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_means_the_end_asks_for_a_drain_and_the_next_one_for_the_end_at_once(
    number: signal.Signals,
) -> None:
    """A terminal that is closed, too."""

    async def main() -> None:
        tree = Tree(1.0, console=None)
        with tree.signals():
            signal.raise_signal(number)
            await asyncio.wait_for(tree._stop.wait(), 60)
            assert not tree._halt.is_set()
            signal.raise_signal(number)
            await asyncio.wait_for(tree._halt.wait(), 60)
        tree._console.close()

    before = signal.signal(number, signal.SIG_IGN)  # where nobody hears it, this process goes on
    try:
        asyncio.run(main())
    finally:
        signal.signal(number, before)


P, D, U, F = Role.PREFILL, Role.DECODE, Role.UNIFIED, Role.FRONTEND


def no_specs(_unit: Unit) -> list[ChildSpec]:
    return []


@pytest.mark.parametrize(
    ("alive", "dead", "role"),
    [
        ([P, D, F], [], None),
        ([P, D, F], [P, D], None),
        ([D, F], [P], P),
        ([P, F], [D], D),
        ([P, D], [F], F),
        ([U, F], [P], None),  # what was decode is unified now
        ([U, F], [P, D], None),
        ([P, D, F], [U], U),
        ([F], [U], U),
    ],
)
def test_a_service_goes_on_while_each_role_or_a_unified_one_in_its_place_is_there(
    alive: list[Role], dead: list[Role], role: Role | None
) -> None:
    units = []
    for lives, roles in ((True, alive), (False, dead)):
        for each in roles:
            child: Any = SimpleNamespace(role=each, alive=lives)
            units.append(Unit("x", each, no_specs, children=[child]))
    assert missing(units, units) is role, "nothing is started again"
    for unit in units:
        unit.restarts = Restarts()
    assert missing(units, units) is None, "whoever is away comes back"
    assert missing(units, units[: len(alive)]) is role, "but who has left for good"


# ---- children that are started again -----------------------------------------------------------------


def when(condition: Callable[[], object], action: Callable[[], object]) -> None:
    """Do `action` once `condition` holds; nobody is told when it does."""
    if condition():
        action()
    else:
        asyncio.get_running_loop().call_later(0.01, when, condition, action)


def child(supervisor: Supervisor, name: str) -> Child:
    return next(c for c in supervisor.children if c.spec.name == name)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "frontend"])
def test_the_only_child_of_a_role_that_is_killed_is_started_again_and_told_of(
    tmp_path: Path, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "j"
    caplog.set_level("INFO", "segue.serve")

    def announce(supervisor: Supervisor, url: str) -> None:
        first = child(supervisor, victim)
        first.signal(signal.SIGKILL)
        when(lambda: f"serves_again child={victim}" in caplog.text, lambda: settle(supervisor, first))

    def settle(supervisor: Supervisor, first: Child) -> None:
        assert child(supervisor, victim) is not first
        assert {c.name for c in supervisor.children if c.alive} == {"prefill-0", "decode-0", "frontend"}
        supervisor.stop()

    assert run(journal, announce) == ServeResult(0)
    assert len(set(started(journal, victim))) == 2
    assert f"child={victim} how='signal 9 (SIGKILL)'\n" in caplog.text, "without a word of its being the end"
    assert sorted(events(journal, "left")) == ["decode-0", "frontend", "prefill-0"]
    told = [
        json.loads(line.split("told ")[1])["roles"]
        for line in journal.read_text().splitlines()
        if "told" in line
    ]
    role = victim.removesuffix("-0")
    # A frontend is told at its own start that nobody is missing.
    assert told[:1] == [[]]
    assert ([role] in told) is (victim != "frontend")
    assert told[-1] == []


async def test_a_frontend_comes_back_at_its_port_and_an_instance_in_another_incarnation(
    tmp_path: Path,
) -> None:
    ranks = RanksConfig(prefill_dp=2, enable_expert_parallel=True)
    events = KVEventsConfig(kv_events_port=5557)
    supervisor = supervised.make(tmp_path / "j", stop_at_once, ranks=ranks, decode=2, events=events)
    supervisor.command = lambda role, config: [str(role), *argv(config)]
    units = supervisor.planned("http://127.0.0.1:9", 77, 78)
    for unit in units:
        unit.url = "http://127.0.0.1:4711" if unit.role is Role.FRONTEND else "10.0.0.1:9"
        first, then = unit.make(Unit(unit.name, unit.role, unit.make)), unit.make(unit)
        for spec in [*first, *then]:
            for own in spec.sockets:
                own.close()
        before, after = ([_settings(spec.argv) for spec in made] for made in (first, then))
        if unit.role is Role.FRONTEND:
            assert [words.pop("--port") for words in before + after] == ["0", "4711"]
        if unit.role is Role.PREFILL:
            incarnations = [words.pop("--incarnation") for words in before + after]
            assert incarnations[0] == incarnations[1] != incarnations[2] == incarnations[3]
            assert len({words.pop("--dp-fds") for words in before + after}) == 4
        assert before == after, "all else is what it was: ports, secret, registry, threads"


def _settings(words: Sequence[str]) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in words)


def test_dp_ranks_of_one_instance_are_started_again_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "j"
    caplog.set_level("INFO", "segue.serve")

    def announce(supervisor: Supervisor, url: str) -> None:
        child(supervisor, "decode-0.dp1").signal(signal.SIGKILL)
        when(lambda: "serves_again child=decode-0" in caplog.text, supervisor.stop)

    # The fake children are called by the label, which is the same for both.
    assert run(journal, announce, ranks=RanksConfig(decode_dp=2)) == ServeResult(0)
    assert len(started(journal, "decode-0")) == 4
    assert len(started(journal, "prefill-0")) == len(started(journal, "frontend")) == 1
    assert events(journal, "left").count("decode-0") == 3, "its other rank finished what it had"
    assert caplog.text.count("event=died") == 1


@pytest.mark.parametrize("deaths", [0, 1])
def test_a_switched_instance_restarts_in_its_role_and_under_its_name_also_after_a_death_while_it_loads(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "segue.serve")
    for module in (restarts, process_tree):
        monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.01))
    roles: list[Role] = []
    behaviours = {"decode-1": "switched"}

    def announce(supervisor: Supervisor, url: str) -> None:
        given = supervisor.command

        def command(role: Role, config: InstanceConfig | FrontendConfig) -> Sequence[str]:
            roles.append(role)
            behaviours["decode-1"] = "killed" if len(roles) <= deaths else "ok"
            return given(role, config)

        supervisor.command = command
        switched = child(supervisor, "decode-1")
        switched.signal(signal.SIGUSR1)
        when(lambda: switched.role is Role.PREFILL, lambda: switched.signal(signal.SIGKILL))
        when(lambda: "serves_again child=decode-1" in caplog.text, supervisor.stop)

    assert run(tmp_path / "j", announce, decode=2, behaviours=behaviours) == ServeResult(0)
    assert roles == [Role.PREFILL] * (deaths + 1)
    assert "child=decode-1-as-prefill how='signal 9 (SIGKILL)'" in caplog.text


def test_who_fails_again_and_again_ends_the_service_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another one of its role is left: what keeps failing is not hidden."""
    for module in (restarts, process_tree):
        monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.01))
    behaviours: dict[str, str] = {}

    def announce(supervisor: Supervisor, url: str) -> None:
        behaviours["decode-1"] = "crash"
        child(supervisor, "decode-1").signal(signal.SIGKILL)

    outcome = run(tmp_path / "j", announce, decode=2, behaviours=behaviours)
    assert outcome == ServeResult(
        1,
        "decode-1 was started again 2 times within 60 s of service, and failed again: "
        "decode-1 ended during the start with exit status 3; its last lines:\n"
        "    hello of decode-1\n    the last word",
    )
    assert len(started(tmp_path / "j", "decode-1")) == 3
    assert sorted(events(tmp_path / "j", "left")) == ["decode-0", "frontend", "prefill-0"], "all else drained"


def test_who_leaves_when_asked_to_is_not_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After `segue drain` an operator ends its process."""
    journal = tmp_path / "j"

    def announce(supervisor: Supervisor, url: str) -> None:
        child(supervisor, "decode-1").signal(signal.SIGTERM)
        when(
            lambda: "event=left child=decode-1" in caplog.text,
            child(supervisor, "prefill-0").process.terminate,
        )

    outcome = run(journal, announce, decode=2)
    assert outcome == ServeResult(1, "nothing can serve any more: no prefill is left")
    assert len(started(journal, "decode-1")) == len(started(journal, "prefill-0")) == 1
    assert "event=died" not in caplog.text


def test_a_stop_in_the_pause_before_a_restart_starts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restarts, "PAUSES_S", (600.0,))

    def announce(supervisor: Supervisor, url: str) -> None:
        child(supervisor, "decode-0").signal(signal.SIGKILL)
        when(lambda: "event=restarts child=decode-0 in_s=600" in caplog.text, supervisor.stop)

    assert run(tmp_path / "j", announce) == ServeResult(0)
    assert len(started(tmp_path / "j", "decode-0")) == 1
