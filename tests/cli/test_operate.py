"""The tables of `segue ps` from the answers of leaders; `tests/server/instance` tests the commands
themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from segue.cli.commands import operate_commands as operate
from segue.cli.commands.operate_commands import duration, pairs, shown, table
from segue.cli.commands.operate_flags import seconds
from segue.cli.main import main
from segue.kv.errors import ConfigError, NotFound, PeerLost
from segue.kv.ids import Role
from segue.server.fleet.life import Life
from segue.server.fleet.operator import Row
from segue.server.messages.control import Load
from segue.server.messages.operate import PairStatus, Status
from segue.server.settings.shared_config import TlsConfig
from segue.server.supervisor.local_deployments import announced, runtime_folder

LOAD = Load(
    dp_rank=0,
    running=2,
    waiting=3,
    tokens=9,
    pages_free=5,
    pages_total=16,
    pages_quarantined=4,
    slots_total=2,
)


def pair(peer: str, succeeded: int, **more: object) -> PairStatus:
    return PairStatus(
        peer=peer, transport="shm", bytes_per_s=2e9, nbytes=5 * 10**8, succeeded=succeeded, **more
    )  # type: ignore[arg-type]


def row(role: Role, letter: str, rank: int = 0, *sights: PairStatus, answers: bool = True) -> Row:
    sight = Status(
        role=role,
        state="draining",
        version="1.2",
        uptime_s=3661.0,
        load=LOAD,
        pairs=list(sights),
        frontends=[],
    )
    return Row(
        instance=letter * 32,
        dp_rank=rank,
        role=role,
        served_model="tiny",
        address="10.0.0.1:9",
        draining=False,
        sight=sight if answers else None,
        trouble="" if answers else "no answer within 5 s",
    )


@pytest.mark.parametrize(
    ("uptime_s", "text"),
    [
        (0.0, "0s"),
        (59.9, "59s"),
        (60.0, "1m0s"),
        (3599.0, "59m59s"),
        (3600.0, "1h0m"),
        (86399.0, "23h59m"),
        (86400.0, "1d0h"),
        (2 * 86400.0 + 3 * 3600.0 + 59.0, "2d3h"),
    ],
)
def test_a_time_is_told_in_its_two_largest_units(uptime_s: float, text: str) -> None:
    assert duration(uptime_s) == text


def test_columns_are_as_wide_as_their_longest_entry_and_lines_have_no_end_of_blanks() -> None:
    text = table(("A", "LONG", "C"), [("first", "x", "y"), ("z", "x", "")])
    assert text.splitlines() == ["A      LONG  C", "first  x     y", "z      x"]


def test_what_a_registry_and_a_leader_say_tells_the_terminal_nothing() -> None:
    forged = replace(row(Role.DECODE, "c", answers=False), served_model="\x1b[2J", trouble="\x9b2J\nforged")
    text = shown([forged])
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.endswith(r"cccccccc dp0: \x9b2J\nforged")


def test_leaders_stand_in_order_with_what_they_do_and_who_is_silent_says_why() -> None:
    assert shown([]) == "no instance is registered"
    rows = [
        row(Role.PREFILL, "b", 1),
        row(Role.PREFILL, "b", 0, answers=False),
        row(Role.DECODE, "c"),
        row(Role.PREFILL, "a"),
    ]
    head, *lines = shown(rows).split("\n\n")[0].splitlines()
    assert head.split()[:4] == ["INSTANCE", "DP", "ROLE", "STATE"]
    assert [line.split()[:3] for line in lines] == [
        ["cccccccc", "0", "decode"],
        ["aaaaaaaa", "0", "prefill"],
        ["bbbbbbbb", "0", "prefill"],
        ["bbbbbbbb", "1", "prefill"],
    ]
    assert lines[0].split()[3:] == [
        *("draining", "tiny", "10.0.0.1:9", "2", "3"),
        *("7/5/4", "2/0/0", "0", "1.2", "1h1m"),
    ]
    assert lines[2].split()[3:] == ["no", "answer", "tiny", "10.0.0.1:9", *"-------"]
    assert shown(rows).endswith("\n\nbbbbbbbb dp0: no answer within 5 s")


def test_of_a_pair_the_word_of_prefill_is_taken_and_decode_s_where_there_is_no_other() -> None:
    of_prefill, of_decode, alone = pair("cccccccc dp0", 5), pair("bbbbbbbb dp0", 4), pair("eeeeeeee dp1", 7)
    rows = [row(Role.PREFILL, "b", 0, of_prefill), row(Role.DECODE, "c", 0, of_decode, alone)]
    for each in (rows, rows[::-1]):
        assert pairs(each) == {
            ("bbbbbbbb dp0", "cccccccc dp0"): of_prefill,
            ("eeeeeeee dp1", "cccccccc dp0"): alone,
        }
    joined = shown(rows).split("\n\n")[1].splitlines()
    assert [line.split() for line in joined[1:]] == [
        ["bbbbbbbb", "dp0", "cccccccc", "dp0", "shm", "2.00", "0.500", "5", "0"],
        ["eeeeeeee", "dp1", "cccccccc", "dp0", "shm", "2.00", "0.500", "7", "0"],
    ]


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon", ""])
def test_a_time_to_wait_is_a_number_of_seconds_that_ends(text: str) -> None:
    with pytest.raises(ConfigError, match="--timeout"):
        seconds(text)
    assert seconds("0.5") == 0.5


def test_a_pair_that_has_carried_nothing_has_no_speed_and_failures_are_not_successes() -> None:
    idle = PairStatus(peer="cccccccc dp0", transport="shm", succeeded=0, failed=3)
    line = shown([row(Role.PREFILL, "b", 0, idle)]).split("\n\n")[1].splitlines()[1]
    assert line.split() == ["bbbbbbbb", "dp0", "cccccccc", "dp0", "shm", "-", "-", "0", "3"]


# ---- what a command asks of the fleet ------------------------------------------------------------------

RECORD = SimpleNamespace(role=Role.PREFILL, incarnation="a" * 32)


class Asked:
    """An operator that notes what it is asked."""

    def __init__(self, parts: list[str], silent: list[str]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.life = Life(request_id="r", parts=parts, silent=silent)  # type: ignore[arg-type]

    async def named(self, name: str) -> Any:
        self.calls.append(("named", name))
        return RECORD

    async def steer(self, record: Any, *, draining: bool, timeout_s: float, say: Any) -> None:
        assert record is RECORD
        self.calls.append(("steer", draining, timeout_s))

    async def switch(self, record: Any, role: Role, *, timeout_s: float, say: Any) -> Any:
        assert record is RECORD
        self.calls.append(("switch", role, timeout_s))
        return SimpleNamespace(role=role, incarnation="b" * 32)

    async def ps(self) -> list[Row]:
        return [row(Role.DECODE, "c")]

    async def explain(self, request_id: str) -> Life:
        self.calls.append(("explain", request_id))
        return self.life


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Asked]]:
    """Run a command against such an operator."""
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-some-length")

    def asked(
        words: str, parts: list[str] | None = None, silent: list[str] | None = None
    ) -> tuple[int, Asked]:
        one = Asked(parts or [], silent or [])

        @contextlib.asynccontextmanager
        async def operator(url: str, **given: Any) -> AsyncIterator[Asked]:
            assert url == "https://10.0.0.1:1"
            assert (given["secret"], given["tls"]) == (b"a-secret-of-some-length", "tls of ca.pem")
            yield one

        monkeypatch.setattr(operate, "operator", operator)
        monkeypatch.setattr(operate, "tls_from_files", lambda config, _host: f"tls of {config.tls_ca}")
        monkeypatch.setattr(operate, "describe_life", lambda life: f"the life of {life.request_id}")
        files = "--tls-cert c.pem --tls-key k.pem --tls-ca ca.pem"
        more = f"--registry https://10.0.0.1:1 --secret-file {secret} {files}"
        return main([*words.split(), *more.split()]), one

    return asked


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("drain aaaa", ("steer", True, 600.0)),
        ("drain aaaa --timeout 5", ("steer", True, 5.0)),
        ("resume aaaa", ("steer", False, 600.0)),
        ("switch aaaa decode --timeout 7", ("switch", Role.DECODE, 7.0)),
    ],
)
def test_an_instance_is_steered_as_the_command_says(
    ask: Callable[..., tuple[int, Asked]],
    words: str,
    call: tuple[Any, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, one = ask(words)
    assert (status, one.calls) == (0, [("named", "aaaa"), call])
    said = capsys.readouterr().out
    assert said == ("decode bbbbbbbb serving, before it prefill\n" if "switch" in words else "")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_life_is_told_and_an_unknown_one_is_no_success(
    ask: Callable[..., tuple[int, Asked]], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "explain r" + " --json" * as_json
    status, one = ask(words, parts=["a part"])
    said = capsys.readouterr().out
    assert (status, one.calls) == (0, [("explain", "r")])
    assert json.loads(said)["parts"] == ["a part"] if as_json else said == "the life of r\n"
    for silent in ([], ["decode dddddddd"]):
        status, _ = ask(words, silent=silent)
        captured = capsys.readouterr()
        assert status == 1
        kept = "each keeps its latest 8192 records, in at most 8 MiB, until it ends"
        assert f"no process knows the request 'r': {kept}" in captured.err
        assert ("without an answer: decode dddddddd" in captured.err) is bool(silent)
        if as_json:
            assert json.loads(captured.out)["silent"] == silent
        else:
            assert captured.out == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fleet_is_shown_or_written_as_json(
    ask: Callable[..., tuple[int, Asked]], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = ask("ps" + " --json" * as_json)
    said = capsys.readouterr().out
    assert status == 0
    if as_json:
        assert json.loads(said)[0]["instance"] == "c" * 32
    else:
        assert said.startswith("INSTANCE")


# ---- without --registry --------------------------------------------------------------------------------


@pytest.fixture
def two_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Two deployments of this user by the port of their registries, and what each operator is asked."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    fleets: dict[str, Any] = {"1": Asked([], []), "2": Asked(["a part"], [])}

    @contextlib.asynccontextmanager
    async def operator(url: str, **_given: Any) -> AsyncIterator[Any]:
        if isinstance(fleets[url[-1]], PeerLost):
            raise fleets[url[-1]]
        yield fleets[url[-1]]

    monkeypatch.setattr(operate, "operator", operator)
    monkeypatch.setattr(operate, "describe_life", lambda life: f"the life of {life.request_id}")
    with announced("http://127.0.0.1:8001", "m", "http://127.0.0.1:1", None, TlsConfig()):
        [file] = runtime_folder().iterdir()
        second = file.read_bytes().replace(b":8001", b":8002").replace(b"127.0.0.1:1", b"127.0.0.1:2")
        file.with_stem(f"{file.stem}0").write_bytes(second)
        yield fleets


def test_all_deployments_here_are_shown_and_one_without_an_answer_hides_no_other(
    two_here: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps"]) == 0
    shown_of = dict(part.split("\n", 1) for part in capsys.readouterr().out.strip().split("\n\nhttp"))
    assert len(shown_of) == 2
    assert all("cccccccc" in text for text in shown_of.values())
    two_here["1"] = PeerLost("nobody listens")
    assert main(["ps"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("http://127.0.0.1:8002\n")
    assert "http://127.0.0.1:8001: nobody listens" in said.err


def test_a_deployment_whose_secret_is_gone_hides_no_other(
    two_here: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with announced("http://127.0.0.1:8003", "m", "http://127.0.0.1:3", "no.secret", TlsConfig()):
        assert main(["ps"]) == 1
    said = capsys.readouterr()
    assert "http://127.0.0.1:8002\n" in said.out
    assert "http://127.0.0.1:8003: --secret-file" in said.err


def test_a_request_is_looked_for_in_each_deployment_here(
    two_here: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for dead in (None, "1"):
        if dead:
            two_here[dead] = PeerLost("nobody listens")
        assert main(["explain", "r"]) == 0
        assert capsys.readouterr().out == "the life of r\n"


def test_an_instance_is_looked_for_in_each_deployment_here(
    two_here: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async def unknown(_name: str) -> Any:
        raise NotFound("no such instance")

    assert main(["drain", "aaaa"]) == 1
    assert "have an instance 'aaaa'" in capsys.readouterr().err
    two_here["1"].named = unknown
    assert main(["drain", "aaaa"]) == 0
    assert two_here["2"].calls[-1] == ("steer", True, 600.0)
    two_here["2"].named = unknown
    assert main(["drain", "aaaa"]) == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:8001: no such instance" in said
    assert "http://127.0.0.1:8002: no such instance" in said
