"""The commands pass each setting to its place, and close all that they open.

Doubles stand where a process, a server or a model would be; each notes what it was given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segue.cli.commands import frontend, processes
from segue.engine.cpu.processor import Processor, processor_of
from segue.engine.pool_size import Host, ModelSize
from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.frontend import frontend_process as server
from segue.server.observe import logs
from segue.server.settings.commands import FrontendConfig, InstanceConfig, ServeConfig
from segue.server.settings.layers import argv
from segue.server.settings.shared_config import AccessConfig, AnswersConfig, LimitsConfig, ModelConfig
from segue.server.supervisor.console import Console
from segue.server.supervisor.process_tree import MARGIN_S, THREAD_VARIABLES

SECRET = b"0123456789abcdef"
LIMITS = LimitsConfig(max_body_bytes=4096, drain_s=7.0)
TLS = object()
FLEET = SimpleNamespace(await_restarted=lambda _roles: None)
METRICS = SimpleNamespace(registry=None)


class Noted:
    """The arguments that each double got, by its name."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.order: list[str] = []

    def double(self, name: str, result: Any = None) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            assert name not in self.given, f"{name} twice"
            self.given[name] = (args, named)
            self.order.append(name)
            return result

        return call

    def named(self, name: str) -> dict[str, Any]:
        return self.given[name][1]


# ---- segue frontend ----------------------------------------------------------------------------------


class Registry:
    """Knows one instance."""

    def __init__(self, noted: Noted) -> None:
        self.noted = noted

    async def watch(self) -> AsyncIterator[list[Any]]:
        yield [SimpleNamespace(source="org/source", served_model="served")]

    async def aclose(self) -> None:
        self.noted.order.append("registry closed")


class Listener:
    """Notes when it is closed."""

    url = "http://127.0.0.9:81"
    reason = ""

    def __init__(self, noted: Noted) -> None:
        self.noted = noted

    async def close(self) -> None:
        self.noted.order.append("listener closed")


class Spans:
    def __init__(self, noted: Noted) -> None:
        self.noted = noted

    def on_record(self, record: object) -> None:
        self.noted.order.append("heard")

    def context(self, parent: str) -> str:
        return f"child of {parent}"

    def below(self, parent: str) -> str:
        return f"below {parent}"

    def close(self) -> None:
        self.noted.order.append("spans closed")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted()

    async def run_frontend(*args: Any, **named: Any) -> None:
        noted.double("server")(*args, **named)

    for name, double in {
        "RegistryClient": noted.double("registry", Registry(noted)),
        "Fleet": noted.double("fleet", FLEET),
        "Metrics": lambda: METRICS,
        "traces": noted.double("traces"),
        "resolve": noted.double("resolve", Path("/models/here")),
        "tls_from_files": noted.double("tls", TLS),
        "FrontendListener": noted.double("listener", Listener(noted)),
    }.items():
        monkeypatch.setattr(frontend, name, double)
    monkeypatch.setattr(server, "run_frontend", run_frontend)
    return noted


def front(**settings: Any) -> FrontendConfig:
    return FrontendConfig(
        registry="http://127.0.0.1:1",
        host="127.0.0.9",
        port=81,
        revision="v1",
        cache="/cache",
        answers=AnswersConfig(policy="follow_bootstrap_room", max_attempts=5),
        access=AccessConfig(api_key="hunter2", allowed_hosts="a.example"),
        limit=LIMITS,
        secret=settings.pop("secret", SECRET),
        **settings,
    )


@pytest.mark.parametrize(
    ("model", "name", "found", "served"),
    [
        (None, None, "org/source", "served"),
        ("mine", None, "mine", "served"),
        (None, "called", "org/source", "called"),
        ("mine", "called", "mine", "called"),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_every_setting_of_a_frontend_reaches_what_it_is_for(
    noted: Noted,
    monkeypatch: pytest.MonkeyPatch,
    model: str | None,
    name: str | None,
    found: str,
    served: str,
    traced: bool,
) -> None:
    if traced:
        monkeypatch.setattr(frontend, "traces", noted.double("traces", Spans(noted)))
    ready: list[str] = []
    config = front(model=model, served_model_name=name)
    asyncio.run(frontend.run(config, ready.append, processes.Lifeline()))
    assert noted.given["tls"][0] == (config.tls, None)
    limits = config.limit.limits()
    assert noted.given["registry"][0] == ("http://127.0.0.1:1",)
    given = noted.named("registry")
    assert (given["secret"], given["limits"], given["tls"]) == (SECRET, limits, TLS)
    assert noted.given["resolve"] == ((found, "/cache", "v1"), {"weights": False})
    [registry, settings], given = noted.given["fleet"]
    assert isinstance(registry, Registry)
    assert (settings.served_model, settings.policy) == (served, "follow_bootstrap_room")
    assert settings.max_attempts == 5
    assert (given["secret"], given["limits"], given["tls"]) == (SECRET, limits, TLS)
    (told, fleet, metrics, stop), more = noted.given["server"]
    assert told is config
    assert (fleet, metrics, given["metrics"]) == (FLEET, METRICS, METRICS)
    assert not stop.is_set()
    assert (more["model_folder"], more["served_model"]) == (Path("/models/here"), served)
    assert noted.given["listener"][0] == ("127.0.0.9", 81)
    assert noted.named("listener") == {
        "drain_s": 7.0,
        "keys": more["keys"],
        "metrics": METRICS,
        "clients": config.clients,
        "hosts": frozenset({"a.example"}),
    }
    assert isinstance(more["listener"], Listener)
    assert more["keys"].owner(b"Bearer hunter2") is not None
    assert more["keys"].owner(b"Bearer other") is None
    assert more["records"] is given["records"], "what the fleet notes is what the server explains"
    more["on_ready"]("http://here")
    assert ready == ["http://here"]
    if traced:
        given["records"].on_record("a record")
        context = more["trace"]("parent")
        assert (context.parent, context.child) == ("parent", "below child of parent")
        assert noted.order[-3:] == ["listener closed", "registry closed", "heard"]
    else:
        assert given["records"].on_record is None
        assert noted.order[-1] == "registry closed"


def test_a_frontend_without_a_secret_has_none(noted: Noted) -> None:
    config = front(model="mine", served_model_name="m", secret=b"")
    asyncio.run(frontend.run(config, lambda _url: None, processes.Lifeline()))
    assert noted.named("registry")["secret"] is noted.named("fleet")["secret"] is None


@pytest.mark.parametrize("model", [None, "mine"])
def test_a_tokenizer_that_is_not_there_is_the_user_s_only_if_the_user_named_it(
    noted: Noted, monkeypatch: pytest.MonkeyPatch, model: str | None
) -> None:
    def resolve(*_args: object, **_named: object) -> Path:
        raise ConfigError("there is no such model")

    monkeypatch.setattr(frontend, "resolve", resolve)
    with pytest.raises(ConfigError, match="there is no such model" if model else "give --model PATH"):
        asyncio.run(frontend.run(front(model=model), lambda _url: None, processes.Lifeline()))
    assert noted.order[-1] == "registry closed"


def test_a_frontend_that_is_ended_before_there_is_an_instance_starts_nothing(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_registry: object, _stop: object) -> None:
        return None

    monkeypatch.setattr(frontend, "first_record", nothing)
    asyncio.run(frontend.run(front(), lambda _url: None, processes.Lifeline()))
    assert "fleet" not in noted.given
    assert noted.order[-1] == "registry closed"


# ---- segue serve -------------------------------------------------------------------------------------

HOST, SIZE = Host(cores=6, free_bytes=2**33), ModelSize(10**6, 1000, 4096)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Nothing is looked for on this host, and no log is configured."""
    noted = Noted()
    for name, double in {
        "logs": SimpleNamespace(
            configure=lambda *given: noted.order.append(f"log {given[1]!r}"),
            event=lambda *_, **__: None,
            say=logs.say,
        ),
        "check_transport": noted.double("check_transport"),
        "check_port": noted.double("check_port"),
        "tls_from_files": noted.double("tls", TLS),
        "resolve": noted.double("resolve", Path("/models/here")),
        "model_size": noted.double("model_size", SIZE),
        "this_host": lambda: HOST,
    }.items():
        monkeypatch.setattr(processes, name, double)
    return noted


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("keys", [(), ("hunter2",)])
def test_every_setting_of_a_deployment_reaches_its_supervisor(
    started: Noted,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    keys: tuple[str, ...],
) -> None:
    class Supervisor:
        def __init__(self, config: ServeConfig, **named: Any) -> None:
            started.given["supervisor"] = ((config,), named)

        async def run(self) -> Any:
            return SimpleNamespace(status=status, reason="it broke" if status else "")

    monkeypatch.setattr(processes, "Supervisor", Supervisor)
    config = ServeConfig(
        model="org/name",
        host="127.0.0.9",
        port=81,
        transport="tcp",
        bootstrap_port=82,
        engine=ModelConfig(cache="/cache", revision="v1", dtype="float32"),
        access=AccessConfig(api_key=keys[0] if keys else None),
        limit=LIMITS,
    )
    assert processes.serve(config) == status
    assert ("it broke" in capsys.readouterr().err) is bool(status)
    assert started.given["check_transport"][0] == ("tcp",)
    assert started.given["check_port"][0] == ("127.0.0.9", 81)
    assert started.given["tls"][0] == (config.tls, "127.0.0.1")
    assert started.given["resolve"][0] == ("org/name", "/cache", "v1")
    assert started.given["model_size"][0] == (Path("/models/here"), "float32")
    [given], named = started.given["supervisor"]
    assert (given.model, given.engine.served_model_name) == ("/models/here", "org/name")
    assert (named["host"], named["size"], tuple(named["keys"])) == (HOST, SIZE, keys)
    assert given.limit == LIMITS
    # What the supervisor calls: its registry and what it tells a person.
    monkeypatch.setattr(processes, "run_registry", started.double("registry"))
    named["registry"](SECRET)
    assert started.given["registry"][0] == (82, SECRET, LIMITS.limits(), TLS)
    named["announce"]("http://here", "http://registry", "/tmp/secret")
    named["console"].close()
    said = capsys.readouterr()
    assert said.out == "ready http://here\n"
    assert ("Authorization" in said.err) is bool(keys)
    assert "hunter2" not in said.err + said.out


@pytest.mark.parametrize("command", ["serve", "decode"])
def test_pools_beyond_the_memory_are_refused_before_a_model_is_fetched(
    started: Noted, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from segue.server.instance import registry_link as registry

    engine = ModelConfig(kv_gib=HOST.free_bytes / 2**30 + 0.5)
    config = InstanceConfig(model="org/name", registry="http://127.0.0.1:1", engine=engine)
    monkeypatch.setattr(processes.flags, "load", lambda *_args, **_fixed: config)
    monkeypatch.setattr(registry, "registry_of", lambda found: contextlib.nullcontext(found))
    args = argparse.Namespace(command=command, lifeline_fd=None, report_fd=None)
    with pytest.raises(ConfigError, match=r"--kv-gib .* the 8\.00 GiB"):
        processes.serve(ServeConfig(engine=engine)) if command == "serve" else processes.instance(args)
    assert "resolve" not in started.given


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_was_started_is_one_sentence_and_status_1(
    started: Noted,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    def fetching(*_: object) -> None:
        signal.raise_signal(number)

    handled = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(processes, "resolve", fetching)
    assert processes.serve(ServeConfig()) == 1
    said = capsys.readouterr()
    assert said.err == "segue: stopped while loading: nothing was started, and nothing was served\n"
    assert said.out == ""
    assert signal.getsignal(signal.SIGTERM) == handled


def test_the_registry_of_a_deployment_is_on_loopback_with_its_secret_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from segue.server.registry import registry_server as server

    noted = Noted()

    class Server:
        url = "http://there"

        async def close(self) -> None:
            noted.order.append("closed")

    async def serve(*args: Any, **named: Any) -> Server:
        noted.given["serve"] = (args, named)
        return Server()

    async def main() -> None:
        async with processes.run_registry(82, SECRET, LIMITS.limits(), TLS) as url:  # type: ignore[arg-type]
            assert url == "http://there"
            assert noted.order == []
            raise KeyError("a bug")

    monkeypatch.setattr(server, "serve", serve)
    with pytest.raises(KeyError):
        asyncio.run(main())
    assert noted.given["serve"] == (
        ("127.0.0.1", 82),
        {"secret": SECRET, "limits": LIMITS.limits(), "tls": TLS},
    )
    assert noted.order == ["closed"]


# ---- segue prefill, decode, unified ------------------------------------------------------------------


class Lifeline:
    """The lifeline of a process with or without a supervisor."""

    def __init__(self, supervised: bool, noted: Noted) -> None:
        self.supervised = supervised
        self.noted = noted
        self.reports: list[Any] = []

    def watch(self, grace_s: float) -> None:
        self.noted.given["watch"] = ((grace_s,), {})

    def report(self, report: Any) -> None:
        self.reports.append(report)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "99")


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.usefixtures("environment")
def test_every_setting_of_an_instance_reaches_what_runs_it(
    started: Noted,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    supervised: bool,
    dp: int,
) -> None:
    from segue.server.instance import registry_link as registry
    from segue.server.instance import role_lifecycle as turns

    ends = Lifeline(supervised, started)
    monkeypatch.setattr(processes, "Lifeline", lambda *_fds: ends)
    config = InstanceConfig(
        model="org/name",
        role=Role.DECODE,
        registry="http://127.0.0.1:1",
        tp=2,
        dp=dp,
        transport="tcp",
        engine=ModelConfig(cache="/cache", revision="v1", dtype="float32", kv_gib=1.0),
        limit=LIMITS,
    )
    monkeypatch.setattr(processes.flags, "load", lambda cls, name, _args, **fixed: config)

    @contextlib.contextmanager
    def registry_of(given: InstanceConfig) -> Iterator[InstanceConfig]:
        assert given.registry == "http://127.0.0.1:1"
        yield dataclasses.replace(given, registry="http://127.0.0.1:2")

    ran: list[InstanceConfig] = []

    def run_instance(now: InstanceConfig, *, on_ready: Any, supervised: bool) -> int:
        assert supervised is ends.supervised
        ran.append(now)
        on_ready(dataclasses.replace(now, role=Role.PREFILL), "tcp://here", "http://door")  # it was switched
        return 3

    def serve_ranks(now: InstanceConfig, lifeline: object, listed: object) -> int:
        assert lifeline is ends
        started.order.append("ranks")
        ran.append(now)
        return 3

    monkeypatch.setattr(registry, "registry_of", registry_of)
    monkeypatch.setattr(turns, "run_instance", run_instance)
    monkeypatch.setattr(processes, "serve_ranks", serve_ranks)
    args = argparse.Namespace(command="decode", lifeline_fd=None, report_fd=None)
    assert processes.instance(args) == 3
    assert started.given["watch"][0] == (7.0 + MARGIN_S,), "no instance outlives its supervisor"
    assert started.given["check_transport"][0] == ("tcp",)
    assert started.given["resolve"][0] == ("org/name", "/cache", "v1")
    assert started.given["model_size"][0] == (Path("/models/here"), "float32")
    threads = config.engine.threads(HOST, dp * 2)
    assert {os.environ[name] for name in THREAD_VARIABLES} == {str(threads)}
    [now] = ran
    assert ("ranks" in started.order) is (dp > 1)
    assert (now.registry, now.model) == ("http://127.0.0.1:2", "/models/here")
    assert now.engine.revision is None, "a path has none"
    assert (now.engine.threads_per_worker, now.engine.served_model_name) == (threads, "org/name")
    assert now.engine.kv_gib == config.kv_bytes(HOST, SIZE) / 2**30 == 1.0 / dp
    if dp == 1 and supervised:
        [report] = ends.reports
        assert (report.url, report.role, report.door) == ("tcp://here", Role.PREFILL, "http://door")
        assert started.order.count("log ''") == 1, "its supervisor names it"
    elif dp == 1:
        assert capsys.readouterr().out == "ready tcp://here\n"
        assert [word for word in started.order if word.startswith("log")] == ["log 'decode'", "log 'prefill'"]


def test_an_instance_that_is_ended_before_its_registry_is_there_loads_nothing(
    started: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segue.server.instance import registry_link as registry

    config = InstanceConfig(model="org/name", registry="http://127.0.0.1:1")
    monkeypatch.setattr(processes.flags, "load", lambda *_args, **_fixed: config)
    monkeypatch.setattr(registry, "registry_of", lambda _config: contextlib.nullcontext(None))
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "1")
    args = argparse.Namespace(command="prefill", lifeline_fd=None, report_fd=None)
    assert processes.instance(args) == 0
    assert "resolve" not in started.given


AVX2, AMX = (processor_of(f"flags: {flags}", {}) for flags in ("avx2", "avx512f avx512_bf16"))


@pytest.mark.parametrize(
    ("processor", "setting", "dtype", "warns"),
    [
        (AVX2, "auto", "float32", False),
        (AVX2, "bfloat16", "bfloat16", True),
        (AVX2, "float16", "float16", True),
        (AMX, "auto", "bfloat16", False),
        (AMX, "float16", "float16", True),
    ],
)
@pytest.mark.parametrize("command", ["serve", "decode", "a child of serve"])
@pytest.mark.usefixtures("environment")
def test_the_type_is_chosen_once_before_anything_is_sized_and_said_once(
    started: Noted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: str,
    processor: Processor,
    setting: str,
    dtype: str,
    warns: bool,
) -> None:
    from segue.server.instance import registry_link as registry
    from segue.server.instance import role_lifecycle as turns

    monkeypatch.setattr(processes, "this_processor", lambda: processor)
    events: list[tuple[str, object]] = []
    monkeypatch.setattr(
        processes.logs, "event", lambda _log, name, **parts: events.append((name, parts)), raising=False
    )
    made: list[Any] = []

    class Supervisor:
        def __init__(self, config: ServeConfig, **_named: Any) -> None:
            made.append(config)

        async def run(self) -> Any:
            return SimpleNamespace(status=0, reason="")

    monkeypatch.setattr(processes, "Supervisor", Supervisor)
    monkeypatch.setattr(processes, "Lifeline", lambda *_fds: Lifeline(command == "a child of serve", started))
    monkeypatch.setattr(registry, "registry_of", contextlib.nullcontext)
    monkeypatch.setattr(turns, "run_instance", lambda config, **_named: made.append(config) or 0)
    engine = ModelConfig(dtype=setting)
    with caplog.at_level("INFO", logger="segue"):
        if command == "serve":
            processes.serve(ServeConfig(model="org/name", engine=engine))
        else:
            config = InstanceConfig(
                model="org/name", role=Role.DECODE, registry="http://127.0.0.1:1", engine=engine
            )
            monkeypatch.setattr(processes.flags, "load", lambda *_args, **_fixed: config)
            args = argparse.Namespace(command="decode", lifeline_fd=None, report_fd=None)
            processes.instance(args)
    assert [config.engine.dtype for config in made] == [dtype]
    assert started.given["model_size"][0] == (Path("/models/here"), dtype)
    if command == "serve":
        child = made[0].instance(Role.DECODE, "decode-0", HOST, "http://127.0.0.1:1", SIZE)
        assert f"--dtype={dtype}" in argv(child)
    quiet = command == "a child of serve"
    said = {"dtype": dtype, "setting": setting, "reason": processor.reason}
    assert [parts for name, parts in events if name == "dtype"] == [said] * (not quiet)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (warns and not quiet)
    assert all(f"--dtype {dtype} is slow here" in text for text in warnings)


@pytest.mark.parametrize("status", [0, 1])
def test_the_ranks_of_an_instance_are_told_of_once_and_their_end_is_its_own(
    started: Noted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    class Ranks:
        def __init__(self, config: InstanceConfig, command: Any, announce: Any, *, console: Console) -> None:
            assert command is processes.child_command
            self.announce = announce

        async def run(self) -> Any:
            self.announce("127.0.0.1:1,127.0.0.1:2")
            return SimpleNamespace(status=status, reason="a rank has died" if status else "")

    monkeypatch.setattr(processes, "RankProcesses", Ranks)
    ends = Lifeline(True, started)
    monkeypatch.setattr(processes, "announced_instance", started.double("listed", contextlib.nullcontext()))
    with contextlib.ExitStack() as listed:
        config = InstanceConfig(model="m", dp=2)
        assert processes.serve_ranks(config, ends, listed) == status  # type: ignore[arg-type]
    assert [report.url for report in ends.reports] == ["127.0.0.1:1,127.0.0.1:2"]
    assert started.given["listed"][0][0] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert ("a rank has died" in capsys.readouterr().err) is bool(status)


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("ends_how", ["drained", "at once"])
def test_a_frontend_s_process_watches_its_supervisor_and_says_how_it_ended(
    started: Noted, monkeypatch: pytest.MonkeyPatch, supervised: bool, ends_how: str
) -> None:
    ends = Lifeline(supervised, started)
    monkeypatch.setattr(processes, "Lifeline", lambda *_fds: ends)
    monkeypatch.setattr(processes.flags, "load", lambda *_args, **_fixed: front())

    async def serve_http(config: FrontendConfig, on_ready: Any, lifeline: Any) -> bool:
        assert lifeline is ends
        on_ready("http://here")
        if ends_how == "at once":
            raise asyncio.CancelledError
        return True

    monkeypatch.setattr(frontend, "run", serve_http)
    args = argparse.Namespace(command="frontend", lifeline_fd=None, report_fd=None)
    assert processes.frontend(args) == (1 if ends_how == "at once" else 0)
    assert started.given["watch"][0] == (7.0 + MARGIN_S,)
    assert ("check_port" in started.given) is not supervised, "its supervisor has looked"
    assert [report.url for report in ends.reports] == (["http://here"] if supervised else [])
    assert started.order[0] == ("log ''" if supervised else "log 'frontend'")
