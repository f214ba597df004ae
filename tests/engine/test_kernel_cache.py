"""Kernels on disk: which are taken, which are not, and what happens when the folder cannot be used."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
from numba.core import caching

from segue.engine.cpu import kernel_cache
from segue.engine.cpu.kernel_cache import Source, compile_kernels, usable_folder

PLAIN = {"error_model": "numpy"}
SIGNATURE = numba.void(numba.int64)

#: What a process runs, in a file of its own: numba keeps nothing of a function that lies in none.
HEAD = """
import logging, sys
from pathlib import Path
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(levelname)s %(message)s")
"""
#: Compiles kernels that write the numbers in their names, and uses them.
WRITING = """
import numba, numpy as np
from segue.engine.cpu.cpu_numba import OPTIONS, indices
from segue.engine.cpu.kernel_cache import Source, compile_kernels
def writing(number):
    def write(at):
        indices(at, 1)[0] = number
    return write
numbers = [int(word) for word in sys.argv[2:]]
sources = [Source(f"write_{n}", writing(n), numba.void(numba.int64)) for n in numbers]
found = np.zeros(1, np.int32)
for number, kernel in zip(numbers, compile_kernels(sources, OPTIONS, Path(sys.argv[1]))):
    kernel(found.ctypes.data)
    assert found[0] == number, (found, number)
print("right")
"""
#: Compiles the kernels of a small model and uses one.
MODEL = """
import torch
from segue.engine.cpu.cpu_kernels import make_kernels
kernels = make_kernels("float32", 8, 2, 1, 1)
x, out, weight = torch.ones(8, 64), torch.zeros(8, 64), torch.ones(64)
kernels.norm(x.data_ptr(), out.data_ptr(), weight.data_ptr(), 8, 64, 0.0)
if out.eq(1).all():
    print("right")
"""


def kernel(name: str = "double", addend: int = 1) -> Source:
    def double(x: int) -> None:
        x += x + addend

    return Source(name, double, SIGNATURE)


class Script:
    """A script; its processes end with the test."""

    def __init__(self, path: Path, text: str) -> None:
        path.write_text(HEAD + text)
        self._path = path
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *argv: object, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(self._path), *map(str, argv)],
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Script]:
    made = Script(tmp_path / "script.py", getattr(request, "param", WRITING))
    yield made
    made.close()


def said(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    assert "right" in out, out
    return out


@pytest.fixture
def counts(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """Compiles and says how many kernels were compiled and how many came from the cache."""
    caplog.set_level(logging.INFO, "segue.engine")

    def compiled(*sources: Source, options: dict[str, object] | None = None) -> str:
        caplog.clear()
        usable_folder.cache_clear()
        compile_kernels(sources, options or PLAIN, tmp_path)
        return caplog.messages[-1].partition("event=kernels_ready ")[2].partition(" seconds")[0]

    return compiled


def test_a_kernel_is_compiled_once_and_then_read(counts) -> None:
    assert counts(kernel()) == "compiled=1 from_cache=0"
    assert counts(kernel()) == "compiled=0 from_cache=1"


def test_progress_is_said_before_each_kernel_is_compiled(counts, caplog: pytest.LogCaptureFixture) -> None:
    counts(kernel("first"))
    counts(kernel("first"), kernel("second"), kernel("third"))
    assert [line for line in caplog.messages if "compiling" in line] == [
        "event=kernel_compiling kernel=second done=1 of=3",
        "event=kernel_compiling kernel=third done=2 of=3",
    ]


def test_a_kernel_for_one_thread_is_not_taken_for_one_of_several(counts) -> None:
    """numba's own key does not have the options."""
    assert counts(kernel()) == "compiled=1 from_cache=0"
    assert counts(kernel(), options={**PLAIN, "fastmath": True}) == "compiled=1 from_cache=0"


def test_no_two_kernels_share_a_file(counts, tmp_path: Path) -> None:
    """Two processes that add to one index at once can leave one's code under the other's key."""
    for name, addend in (("one", 1), ("two", 2)):
        counts(kernel(name, addend))
        counts(kernel(name, addend), options={**PLAIN, "fastmath": True})
    assert len(list(tmp_path.rglob("*.nbi"))) == len(list(tmp_path.rglob("*.nbc"))) == 4


@pytest.mark.parametrize(
    "changed", ["CPU_NAME", "CPU_FEATURES", "numba", "llvmlite", "source"], ids=lambda name: name.lower()
)
def test_another_processor_version_or_source_takes_none_of_them(
    counts, changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = usable_folder(tmp_path)
    usable_folder.cache_clear()
    if changed == "source":
        other = tmp_path / "cpu_kernels.py"
        other.write_text("another edition")
        monkeypatch.setattr(kernel_cache, "SOURCES", (other,))
    elif changed in ("numba", "llvmlite"):
        before = kernel_cache.version
        monkeypatch.setattr(kernel_cache, "version", lambda name: "0.0" if name == changed else before(name))
    else:
        # Not "generic" and "": those may be this processor's own.
        monkeypatch.setattr(numba.config, changed, "another")
    assert usable_folder(tmp_path) != here
    usable_folder.cache_clear()


@pytest.mark.slow
def test_two_processors_share_a_cache_folder(script: Script, tmp_path: Path) -> None:
    """As two hosts do that have one home directory. Both are named: the variables of a processor without AVX
    call this one generic."""
    processors = [{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": has} for has in ("", "+sse3")]
    for counted in ("compiled=1 from_cache=0", "compiled=0 from_cache=1"):
        for processor in processors:
            assert counted in said(script.start(tmp_path, 5, **processor))


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_leave_what_each_of_them_can_read(
    script: Script, tmp_path: Path
) -> None:
    asked = [(1, 2), (2, 1), (1, 3)]
    for process in [script.start(tmp_path, *numbers) for numbers in asked]:
        said(process)
    assert "compiled=0 from_cache=3" in said(script.start(tmp_path, 1, 2, 3))


@pytest.mark.parametrize("damage", [b"", b"\x80\x04x", b"no pickle"], ids=["empty", "cut", "other"])
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_files_are_replaced(
    counts, caplog: pytest.LogCaptureFixture, tmp_path: Path, suffix: str, damage: bytes
) -> None:
    counts(kernel())
    (path,) = tmp_path.rglob(f"*.{suffix}")
    path.write_bytes(damage)
    assert counts(kernel()) == "compiled=1 from_cache=0"
    assert "event=kernel_files_damaged" in caplog.text
    assert counts(kernel()) == "compiled=0 from_cache=1"


def test_a_full_disk_costs_one_warning(counts, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert counts(kernel()) == "compiled=1 from_cache=0"
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    assert "No space left" in caplog.text


def test_a_kernel_that_cannot_be_compiled_is_an_error(counts) -> None:
    def wrong(x: int) -> None:
        x.nothing()  # type: ignore[attr-defined]

    with pytest.raises(numba.TypingError):
        counts(Source("wrong", wrong, SIGNATURE))


@pytest.mark.parametrize("what", ["a file", "writable by others"])
def test_a_folder_that_cannot_be_trusted_or_used_costs_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, what: str
) -> None:
    if what == "a file":
        (tmp_path / "kernels").write_text("")
    else:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels").chmod(0o777)
    for name in ("one", "two"):
        (made,) = compile_kernels([kernel(name)], PLAIN, tmp_path)
        made(1)
    assert caplog.text.count("event=kernels_not_kept") == 1
    assert not list(tmp_path.rglob("*.nb?"))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids=oct)
def test_a_new_folder_is_its_users_alone_whatever_the_umask(counts, tmp_path: Path, umask: int) -> None:
    """002 is the default of users on Fedora and others; the folder was refused there at every start."""
    before = os.umask(umask)
    try:
        assert counts(kernel("one")) == "compiled=1 from_cache=0"
        assert counts(kernel("one")) == "compiled=0 from_cache=1"
    finally:
        os.umask(before)
    assert (tmp_path / "kernels").stat().st_mode & 0o077 == 0


@pytest.mark.slow  # compiles a model's kernels twice
@pytest.mark.parametrize("script", [MODEL], indirect=True)
def test_a_read_only_install(script: Script, tmp_path: Path) -> None:
    """Nothing is written beside the source. Modes do not stop root; a file in the place of a folder does."""
    install = tmp_path / "install"
    source = Path(kernel_cache.__file__).parents[2]
    shutil.copytree(source, install / "segue", ignore=shutil.ignore_patterns("__pycache__"))
    folders = [install, *(path for path in install.rglob("*") if path.is_dir())]
    for folder in folders:
        (folder / "__pycache__").write_text("")
        folder.chmod(0o555)
    environ = {"PYTHONPATH": str(install), "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}
    try:
        kept = {**environ, "SEGUE_CACHE": str(tmp_path / "cache")}
        assert "compiled=3 from_cache=0" in said(script.start(**kept))
        assert "compiled=0 from_cache=3" in said(script.start(**kept))
        out = said(script.start(**environ, SEGUE_CACHE="/dev/null/cache"))
        assert out.count("WARNING") == out.count("event=kernels_not_kept") == 1
        assert "compiled=3 from_cache=0" in out
        assert not list(install.rglob("*.nb?"))
    finally:
        for folder in folders:
            folder.chmod(0o755)
