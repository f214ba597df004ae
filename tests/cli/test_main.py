"""The command line itself: help, statuses, sentences, secrets, log lines."""

import asyncio
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from segue import __version__
from segue.cli import flags
from segue.cli import main as cli_main
from segue.cli.commands import frontend, models, processes
from segue.cli.main import main, parser
from segue.engine.pool_size import ModelSize
from segue.kv.errors import ConfigError, Internal, NotFound, PeerRefused
from segue.kv.ids import Role
from segue.server.observe import logs
from segue.server.settings.commands import COMMANDS, FrontendConfig, InstanceConfig, ServeConfig
from segue.server.settings.layers import Layers, argv, build, settings
from segue.server.settings.shared_config import AccessConfig, LogConfig
from segue.server.supervisor.console import Console
from segue.server.supervisor.lifeline import CannotStart, Lifeline, Ready, decode_report

CONTRACT = {
    "serve": "model host port prefill decode unified transport dtype page-tokens chunk-tokens kv-gib "
    "threads-per-worker log-level api-key api-key-file",
    "prefill": "model http-port bootstrap-port registry secret-file transport",
    "decode": "model http-port registry secret-file transport",
    "frontend": "registry port secret-file policy api-key api-key-file",
    "ps": "registry secret-file json",
    "drain": "registry secret-file timeout",
    "explain": "registry secret-file json",
    "switch": "registry secret-file timeout",
    "bench": "input-tokens output-tokens requests concurrency rate slo-ttft-ms slo-itl-ms json",
}


@pytest.mark.parametrize("command", sorted(CONTRACT))
def test_the_stable_flags_exist(command: str) -> None:
    words = parser()[1][command].words()
    assert [f for f in CONTRACT[command].split() if f"--{f}" not in words] == []


@pytest.mark.parametrize("command", ["serve", "prefill", "decode"])
def test_a_flag_is_also_known_under_its_old_name(command: str) -> None:
    assert parser()[1][command].parse_args(["--integrity", "off"]).kv_checksum == "off"


@pytest.mark.parametrize("command", sorted(parser()[1]))
def test_help_has_an_example_and_status_0(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"example:\n  segue {command}" in out
    assert "lifeline" not in out


def test_top_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert [c for c in parser()[1] if not re.search(rf"^  {c} +\w", out, re.M)] == []


def test_the_help_of_serve_begins_with_six_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    first = capsys.readouterr().out.split("\nfirst:\n")[1].split("\nsettings:\n")[0]
    flags_first = re.findall(r"^  (--[\w-]+)", first, re.M)
    assert flags_first == ["--port", "--host", "--api-key-file", "--prefill", "--decode", "--kv-gib"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"segue {__version__}\n"
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"segue {__version__}\n"


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["decod"], "did you mean decode?"),
        (["serve", "--page-token", "8"], "did you mean --page-tokens?"),
        (["serve", "--max-model-len", "8"], "does not know --max-model-len: a sequence may be as long as"),
        (["serve", "--api-kee", "x"], "does not know --api-kee"),
        (["serve", "a", "--model", "b"], "segue serve was given two models, a and --model b"),
        (["serve", "--mod", "b"], "does not know --mod"),
        (["prefill", "--load-balance", "round_robbin"], "round_robin"),
        (["prefill", "--dp-rank-conflict=flail"], "fail"),
        (
            ["decode", "--model", "m", "--registry", "http://h:1", "--cp", "2"],
            "--cp 2 shares out prompts, which prefill computes; set it to 1 here",
        ),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "x"], "--port must be a whole number"),
        (["serve", "--config", "/nowhere.toml"], "--config /nowhere.toml cannot be read"),
        (["serve", "--transport", "sm"], "--transport sm does not exist (did you mean shm?)"),
        (["serve", "--transport", "ascend"], "--transport ascend cannot be used here"),
        (["decode", "--model", "m"], "--registry"),
        (["prefill", "--model", "m", "--secret-file", "/nowhere"], "--secret-file /nowhere cannot be read"),
        (["frontend"], "segue frontend needs --registry"),
    ],
)
def test_a_mistake_is_status_2_and_one_sentence(
    words: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert fragment in captured.err
    assert captured.err.startswith("segue: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom segue.cli.main import main\nmain(['version'])\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'numpy', 'asyncio', 'httpx2', 'starlette', 'rich', 'uvloop')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- configuration ------------------------------------------------------------------------------


def test_flags_variables_and_file_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "segue.toml"
    file.write_text("port = 1\nprefill = 3\n[serve]\ndecode = 4\n")
    monkeypatch.setenv("SEGUE_CONFIG", str(file))
    monkeypatch.setenv("SEGUE_PORT", "2")
    args = parser()[0].parse_args(["serve", "--host", "127.0.0.9"])
    config = flags.load(ServeConfig, "serve", args)
    assert (config.port, config.prefill, config.decode, config.host) == (2, 3, 4, "127.0.0.9")
    other = tmp_path / "other.toml"
    other.write_text("prefill = 5\n")
    args = parser()[0].parse_args(["serve", "the/model", "--config", str(other), "--model", "the/model"])
    config = flags.load(ServeConfig, "serve", args)
    assert (config.prefill, config.decode, config.model) == (5, 1, "the/model"), "the file that was named"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_setting_is_a_flag_with_a_meaning(command: str) -> None:
    made = parser()[1][command]
    for setting in settings(COMMANDS[command]).values():
        assert (setting.flag in made.words()) is not setting.hidden
        assert len(setting.help) > 10


def test_a_childs_command_line_builds_its_configuration_again() -> None:
    registry = "http://127.0.0.1:7"
    instance = InstanceConfig(model="/m", role=Role.DECODE, registry=registry, name="decode-0")
    for role, config in ((Role.DECODE, instance), (Role.FRONTEND, FrontendConfig(registry=registry))):
        words = processes.child_command(role, config)
        assert words[:3] == [sys.executable, "-m", "segue.cli.main"]
        args = parser()[0].parse_args([*words[3:], "--lifeline-fd=3", "--report-fd=4"])
        fixed = {"role": role} if role is Role.DECODE else {}
        again = flags.load(type(config), role, args, **fixed)
        assert again == config
        assert argv(again) == argv(config)


def test_secret_is_read_checked_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    config = FrontendConfig(registry="http://127.0.0.1:7", secret_file=str(file))
    file.write_text("  a-secret-of-some-length\n")
    assert flags.with_secret(config).secret == b"a-secret-of-some-length"
    assert "some-length" not in repr(flags.with_secret(config))
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 to 4096 bytes, not 5"):
        flags.with_secret(config)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        flags.with_secret(config)


def test_a_clients_key_is_never_shown_nor_put_on_a_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEGUE_API_KEY", "hunter2")
    args = parser()[0].parse_args(["frontend", "--registry", "http://127.0.0.1:7"])
    config = flags.load(FrontendConfig, "frontend", args)
    assert config.access.api_key == "hunter2"
    assert "hunter2" not in repr([config, config.derived(), argv(config)])
    serve = flags.load(ServeConfig, "serve", parser()[0].parse_args(["serve", "--api-key-file", "a b"]))
    assert serve.frontend("http://127.0.0.1:7").access == serve.access
    with pytest.raises(ConfigError) as caught:
        build(FrontendConfig, Layers(file={"api_key": 4711}), command="frontend", known=flags.KNOWN)
    assert "4711" not in str(caught.value)
    for access, shown in (
        (None, ""),
        (serve.access, "$SEGUE_API_KEY"),
        (AccessConfig(api_key_file="a b"), "$(grep -m1 '^[^#]' 'a b')"),
    ):
        console = Console()
        processes.announce_ready(console, "http://127.0.0.1:7", "m", access)
        console.close()
        said = capsys.readouterr()
        assert "hunter2" not in said.err + said.out
        assert (f'"Authorization: Bearer {shown}"' in said.err) is bool(shown)
        assert "--cacert" not in said.err
    console = Console()
    processes.announce_ready(console, "https://127.0.0.1:7", "m", None, "my cert.pem")
    console.close()
    assert "try: curl --cacert 'my cert.pem' https://127.0.0.1:7/v1" in capsys.readouterr().err


# ---- children -----------------------------------------------------------------------------------


def report_of(words: list[str]) -> tuple[int, object]:
    read, write = os.pipe()
    try:
        status = main([*words, f"--report-fd={write}"])
        return status, decode_report(os.read(read, 65536))
    finally:
        os.close(read)


def test_a_child_reports_why_it_cannot_start_and_stays_silent(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = report_of(["decode", "--model", "m"])
    assert status == 2
    assert isinstance(report, CannotStart)
    assert (report.status, "--registry" in report.error.text) == (2, True)
    assert capsys.readouterr().err == ""


def test_a_supervised_failure_that_is_not_a_setting_is_status_1() -> None:
    read, write = os.pipe()

    def run() -> int:
        raise PeerRefused("the registry says no")

    assert processes.run_child(Lifeline(None, write), run) == 1
    report = decode_report(os.read(read, 65536))
    os.close(read)
    assert isinstance(report, CannotStart)
    assert report.error.text == "the registry says no"


def test_a_bug_is_reported_by_its_name_and_not_hidden_and_a_person_gets_the_error_itself() -> None:
    read, write = os.pipe()

    def bug() -> int:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        processes.run_child(Lifeline(None, write), bug)
    report = decode_report(os.read(read, 65536))
    assert isinstance(report, CannotStart)
    assert (report.status, report.error.code, "KeyError" in report.error.text) == (1, "INTERNAL", True)

    def refused() -> int:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        processes.run_child(Lifeline(), refused)
    assert processes.run_child(Lifeline(None, write), lambda: 7) == 7
    os.close(write)
    assert os.read(read, 1) == b"", "a process that has done its work reports nothing more"
    os.close(read)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MemoryError(), "OUT_OF_CAPACITY", "out of memory; give a lower --kv-gib"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OUT_OF_CAPACITY", "out of memory; give"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "OUT_OF_CAPACITY",
            "memory",
        ),
        (OSError(errno.EIO, "Input/output error"), "INTERNAL", "OSError: [Errno 5]"),
        (RuntimeError("one line\nand another"), "INTERNAL", "RuntimeError: one line"),
    ],
)
def test_a_child_without_memory_says_what_to_change(error: Exception, code: str, text: str) -> None:
    read, write = os.pipe()

    def load() -> int:
        raise error

    with pytest.raises(type(error)):
        processes.run_child(Lifeline(None, write), load)
    report = decode_report(os.read(read, 65536))
    assert isinstance(report, CannotStart)
    assert (report.status, report.error.code) == (1, code)
    assert text in report.error.text
    assert "\n" not in report.error.text
    os.close(read)
    os.close(write)


def test_who_is_ready_tells_the_supervisor_or_the_person(capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    processes.report_ready(Lifeline(None, write), "decode-0", "10.0.0.1:9", Role.DECODE)
    assert decode_report(os.read(read, 65536)) == Ready("10.0.0.1:9", Role.DECODE)
    assert capsys.readouterr().out == ""
    processes.report_ready(Lifeline(), "decode-0", "10.0.0.1:9", Role.DECODE)
    processes.report_ready(Lifeline(), "decode-0", "")
    assert capsys.readouterr().out == "ready 10.0.0.1:9\nready decode-0\n"
    for fd in (read, write):
        os.close(fd)


@pytest.mark.parametrize(
    ("program", "shown"),
    [("/opt/my tools/segue", "'/opt/my tools/segue' ps"), ("/x/main.py", "/usr/bin/py -m segue.cli.main ps")],
)
def test_the_command_that_shows_a_fleet_is_said_as_this_one_was_started(
    program: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "serve"])
    monkeypatch.setattr(sys, "executable", "/usr/bin/py")
    console = Console()
    processes.announce_ready(console, "http://127.0.0.1:7", "m", None)
    console.close()
    assert f"look: {shown}\n" in capsys.readouterr().err


@pytest.mark.parametrize("size", [15, 16, 4096, 4097])
def test_a_secret_has_from_16_to_4096_bytes(size: int, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"x" * size + b"\n")
    config = FrontendConfig(registry="http://127.0.0.1:7", secret_file=str(file))
    if size in (15, 4097):
        with pytest.raises(ConfigError, match=f"not {size}"):
            flags.with_secret(config)
    else:
        assert flags.with_secret(config).secret == b"x" * size


def test_the_first_signal_asks_a_frontend_to_drain_and_the_second_ends_it(
    own_handlers: dict[signal.Signals, Any],
) -> None:
    async def main() -> None:
        with frontend.drain_signals(supervised=False) as stop:
            signal.raise_signal(signal.SIGTERM)
            await stop.wait()
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert {number: signal.getsignal(number) for number in own_handlers} == own_handlers


def test_a_frontend_under_a_supervisor_goes_on_draining_at_a_second_signal(
    own_handlers: dict[signal.Signals, Any],
) -> None:
    """A service manager signals each process, and the supervisor its children once more."""

    async def main() -> None:
        with frontend.drain_signals(supervised=True) as stop:
            signal.raise_signal(signal.SIGTERM)
            await stop.wait()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.05)

    asyncio.run(main())
    assert {number: signal.getsignal(number) for number in own_handlers} == own_handlers


def test_a_frontend_waits_for_the_first_instance_or_until_it_is_asked_to_leave() -> None:
    ended: list[str] = []

    class Registry:
        async def watch(self) -> AsyncIterator[list[str]]:
            try:
                yield []
                yield ["first", "second"]
                yield ["later"]
            finally:
                ended.append("watch")

    class Silent:
        async def watch(self) -> AsyncIterator[list[str]]:
            try:
                await asyncio.Event().wait()
                yield []
            finally:
                ended.append("silent")

    async def main() -> None:
        stop = asyncio.Event()
        assert await frontend.first_record(Registry(), stop) == "first"  # type: ignore[arg-type, comparison-overlap]
        waiting = asyncio.ensure_future(frontend.first_record(Silent(), stop))  # type: ignore[arg-type]
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        stop.set()
        assert await waiting is None
        assert ended == ["watch", "silent"], "neither watch goes on"

    asyncio.run(main())


def test_each_report_is_a_line_and_nobody_minds_a_supervisor_that_is_gone() -> None:
    read, write = os.pipe()
    lifeline = Lifeline(None, write)
    assert lifeline.supervised
    reports = [Ready("http://127.0.0.1:1", Role.DECODE), Ready("http://127.0.0.1:2", Role.PREFILL)]
    for report in reports:
        lifeline.report(report)
    assert [decode_report(line) for line in os.read(read, 65536).splitlines()] == reports
    os.close(read)
    lifeline.report(reports[0])
    os.close(write)


# ---- log, model ---------------------------------------------------------------------------------


def test_log_lines_are_one_line_with_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    root, segue = logging.getLogger(), logging.getLogger("segue")
    before = root.handlers[:], root.level, segue.level
    try:
        logs.configure(LogConfig(), "decode-0")
        log = logging.getLogger("segue.test")
        logs.event(log, "hello", room=7, text="two words")
        log.warning("forged\nline\r\r2026-01-01 another")
        log.debug("not shown")
        logs.configure(LogConfig(), "prefill-0")
        log.info("switched", extra={})
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root.level = before[:2]
        segue.setLevel(before[2])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("INFO    prefill-0 segue.test switched"), "once, by its new name"
    assert lines[0].endswith("INFO    decode-0 segue.test event=hello room=7 text='two words'")
    assert lines[1].endswith("WARNING decode-0 segue.test forged\\nline\\r\\r2026-01-01 another")


def test_model_size_is_read_from_its_description(tmp_path: Path) -> None:
    description = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(description))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [250], "data_offsets": [0, 500]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(500))
    assert models.model_size(tmp_path, "bfloat16") == ModelSize(500, 23040, 8192)
    assert models.model_size(tmp_path, "float32") == ModelSize(1000, 46080, 8192)
    (tmp_path / "config.json").write_text("[1, 2]")
    assert models.model_size(tmp_path, "bfloat16") is None
    assert models.model_size(tmp_path / "absent", "bfloat16") is None


def test_the_time_of_a_log_line_is_utc_wherever_the_host_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        record = logging.LogRecord("segue.test", logging.INFO, "", 0, "text", None, None)
        record.created = 86400.0 * 365 + 0.0075
        assert logs.TextFormatter("").format(record) == "1971-01-01T00:00:00.007Z INFO    segue.test text"
    finally:
        monkeypatch.undo()
        time.tzset()


# ---- how a command ends -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ConfigError("wrong"), 2),
        (Internal("broke"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_a_command_that_is_ended_says_so_and_is_no_success(
    raised: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(_words: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli_main, "run_command", ended)
    assert main(["serve"]) == status
    assert capsys.readouterr().err.startswith("segue: ")


def test_who_reads_no_longer_costs_a_status_and_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `segue ps | head`: what is still in the buffer must not raise when the interpreter ends."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:

        def talks(_words: list[str]) -> int:
            out.write("a line")
            raise BrokenPipeError

        monkeypatch.setattr(cli_main, "run_command", talks)
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["ps"]) == 1
        out.flush()


def test_what_is_behind_the_equals_sign_of_an_unknown_flag_is_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may be a key."""
    assert main(["serve", "--api-kye=hunter2"]) == 2
    said = capsys.readouterr().err
    assert "does not know --api-kye" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["serve"], "segue.cli.commands.processes.serve"),
        (["doctor"], "segue.cli.doctor.doctor_command.doctor"),
        (["ps"], "segue.cli.commands.operate_commands.operator"),
        (["explain", "r"], "segue.cli.commands.operate_commands.operator"),
        (["drain", "i"], "segue.cli.commands.operate_commands.operator"),
    ],
)
def test_every_command_that_may_have_a_secret_reads_it(
    words: list[str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, given = tmp_path / "secret", []
    file.write_text("a-secret-of-some-length")

    def operator(_registry: str, *, secret: bytes | None, **_named: object) -> NoReturn:
        given.append(secret)
        raise NotFound("none")

    def run(config: Any, *_more: object) -> int:
        given.append(config.secret)
        return 0

    asks = where.endswith("operator")
    monkeypatch.setattr(where, operator if asks else run)
    registry = ["--registry", "http://127.0.0.1:1"] if asks else []
    assert main([*words, *registry, "--secret-file", str(file)]) == asks
    assert given == [b"a-secret-of-some-length"]


@pytest.mark.parametrize("role", ["prefill", "decode", "unified", "frontend"])
def test_a_part_reads_its_secret(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, given = tmp_path / "secret", []
    file.write_text("a-secret-of-some-length")

    def configure(_config: LogConfig, _part: str) -> None:
        raise SystemExit(3)  # what follows would start it

    def with_secret(config: Any) -> Any:
        given.append(flags_with_secret(config).secret)
        return flags_with_secret(config)

    flags_with_secret = flags.with_secret
    monkeypatch.setattr(flags, "with_secret", with_secret)
    monkeypatch.setattr("segue.cli.commands.processes.logs.configure", configure)
    words = [role, "--model", "m", "--registry", "http://127.0.0.1:1", "--secret-file", str(file)]
    with pytest.raises(SystemExit):
        main(words)
    assert given == [b"a-secret-of-some-length"]
