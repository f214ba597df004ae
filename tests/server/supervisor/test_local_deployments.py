"""The folder in which `segue ps` and the like find the deployments of this user."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from segue.cli.commands.bench_flags import config_of
from segue.cli.commands.processes import list_deployment
from segue.cli.main import main, parser
from segue.kv.errors import ConfigError
from segue.server.settings.commands import ServeConfig
from segue.server.settings.shared_config import AccessConfig, ClientsConfig, TlsConfig
from segue.server.supervisor.local_deployments import announced, local_deployments, runtime_folder

REGISTRY = "http://127.0.0.1:9"
NO_TLS = TlsConfig()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return runtime_folder()


def test_a_deployment_is_listed_while_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_deployments() == []
    monkeypatch.chdir(folder.parent)
    tls = TlsConfig(tls_cert="c.pem", tls_key="k.pem", tls_ca="ca.pem")
    with announced("http://127.0.0.1:8000", "tiny", REGISTRY, "segue.secret", tls):
        [found] = local_deployments()
        assert (found.url, found.model, found.registry) == ("http://127.0.0.1:8000", "tiny", REGISTRY)
        # Another process has another working directory.
        assert found.secret_file == str(folder.parent / "segue.secret")
        assert found.tls.tls_ca == str(folder.parent / "ca.pem")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert local_deployments() == [] == list(folder.iterdir())


def test_bench_takes_the_key_and_the_certificate_of_the_deployment_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    config = ServeConfig(
        access=AccessConfig(api_key_file="keys"),
        clients=ClientsConfig(https_cert="cert.pem", https_key="key.pem"),
    )
    url, keys = "https://127.0.0.1:8000", str(folder.parent / "keys")
    with contextlib.ExitStack() as listed:
        list_deployment(listed, config, url, "tiny", REGISTRY, None)
        for words, taken in (
            ([], (url, keys, str(folder.parent / "cert.pem"))),
            (["--api-key-file", "mine"], (url, "mine", str(folder.parent / "cert.pem"))),
            (["http://10.0.0.1:1"], ("http://10.0.0.1:1", None, None)),
        ):
            found = config_of(parser()[0].parse_args(["bench", *words]))
            assert (found.url, found.api_key_file, found.https_cert) == taken


def test_a_killed_deployment_is_not_listed_also_when_another_process_has_its_number(folder: Path) -> None:
    code = (
        "import os, signal\n"
        "from segue.server.settings.shared_config import TlsConfig\n"
        "from segue.server.supervisor.local_deployments import announced\n"
        "with announced('http://127.0.0.1:1', 'm', 'http://127.0.0.1:9', None, TlsConfig()):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == -9
    [left] = folder.iterdir()
    namespace, number = left.stem.split("-")
    ours = folder / f"{namespace}-{os.getpid()}.json"
    ours.write_bytes(left.read_bytes().replace(number.encode(), str(os.getpid()).encode()))
    assert local_deployments() == [] == list(folder.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"url": 3}', b"\xff" * 100, b" " * 70_000])
def test_a_file_that_is_no_deployment_is_taken_away(folder: Path, content: bytes) -> None:
    with announced("http://127.0.0.1:8000", "tiny", REGISTRY, None, NO_TLS):
        [file] = folder.iterdir()
        file.with_stem(f"{file.stem}0").write_bytes(content)
        assert [found.url for found in local_deployments()] == ["http://127.0.0.1:8000"]
        assert list(folder.iterdir()) == [file]


def test_a_container_with_other_process_numbers_leaves_the_files_of_this_host(folder: Path) -> None:
    """It shares the folder. What it announces there is not this host's either."""
    code = (
        "import os\n"
        "from segue.server.settings.shared_config import TlsConfig\n"
        "from segue.server.supervisor.local_deployments import announced, local_deployments\n"
        "assert local_deployments() == []\n"
        "with announced('http://127.0.0.1:1', 'm', 'http://127.0.0.1:9', None, TlsConfig()):\n"
        "    print(len(local_deployments()), flush=True)\n"
        "    input()\n"
    )
    inside = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    if (why := subprocess.run([*inside, "pass"], capture_output=True, text=True, timeout=60)).returncode:
        pytest.skip(f"no namespace of process numbers can be made here: {why.stderr}")
    with announced("http://127.0.0.1:8000", "tiny", REGISTRY, None, NO_TLS):
        with subprocess.Popen(
            [*inside, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "1\n"
            assert [found.url for found in local_deployments()] == ["http://127.0.0.1:8000"]
            assert len(list(folder.iterdir())) == 2, "its file is still there"
            other.communicate("\n", timeout=60)
        assert [found.url for found in local_deployments()] == ["http://127.0.0.1:8000"]
        assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("spoil", ["writable", "link", "file"])
def test_a_folder_that_others_can_write_is_refused(folder: Path, spoil: str) -> None:
    """Whoever can write there could send our next command to a registry of theirs."""
    if spoil == "writable":
        folder.mkdir()
        folder.chmod(0o770)
    elif spoil == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(ConfigError, match="nobody else can write"):
        local_deployments()
    with (
        pytest.raises((ConfigError, FileExistsError)),
        announced("http://127.0.0.1:8000", "tiny", REGISTRY, None, NO_TLS),
    ):
        pass


def test_without_a_runtime_folder_it_is_one_of_this_user_among_the_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_folder().name == f"segue-{os.getuid()}"


@pytest.mark.parametrize("words", [["ps"], ["explain", "x"], ["drain", "3f9a"], ["bench"]])
def test_a_command_without_a_deployment_says_what_to_do(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert (
        "no deployment of this user runs on this host: start one with segue serve" in capsys.readouterr().err
    )


def test_bench_wants_a_url_where_several_deployments_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with announced("http://127.0.0.1:8000", "tiny", REGISTRY, None, NO_TLS):
        [file] = folder.iterdir()
        file.with_stem(f"{file.stem}0").write_bytes(file.read_bytes().replace(b":8000", b":8001"))
        assert main(["bench"]) == 2
    said = capsys.readouterr().err
    assert "name one: http://127.0.0.1:800" in said
    assert ", http://127.0.0.1:800" in said
