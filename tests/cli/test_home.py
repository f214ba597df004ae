"""A user without a home folder gets a private one."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from segue.cli.main import main
from segue.engine.models.model_store import cache_folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files of a user without a home folder; without it, too, after the test."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "to be restored")
    for name in ("HOME", "XDG_CACHE_HOME", "SEGUE_CACHE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_caches_are_in_a_private_folder(temporary: Path) -> None:
    assert main(["version"]) == 0
    home = temporary / f"segue-{os.getuid()}"
    assert home.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == home / ".cache/segue"
    assert os.environ["HOME"] == str(home), "for child processes, too"


def test_a_folder_that_others_can_write_is_not_taken(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = temporary / f"segue-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    assert main(["version"]) == 2
    assert "nobody else can write: correct it, or set HOME" in capsys.readouterr().err


def test_without_any_folder_one_sentence_says_what_to_set(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    assert main(["version"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("segue: this user has no home folder (HOME is not set)")
    assert line.endswith("set HOME, or TMPDIR")


def test_a_user_with_a_home_folder_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    assert main(["version"]) == 0
    assert os.environ["HOME"] == "/nowhere"
