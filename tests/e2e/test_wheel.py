"""The source distribution and the wheel built from it: their content and metadata, and that the library and
the server run from the wheel in environments of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from segue.cli.main import parser

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

#: What `pip install segue` brings.
LIBRARY = {"msgspec", "numpy", "uvloop", "xxhash"}
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by setuptools from a copy of all tracked files."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.rstrip("\0").split("\0"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    [made] = folder.glob("segue-*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(sdist))
    [made] = folder.glob("segue-*.whl")
    return made


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment after `pip install segue`."""
    folder = tmp_path_factory.mktemp("library")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "-c", "constraints.txt", str(wheel))
    return python


def run(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environ,
        cwd=python.parent,
    )


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_source_distribution_has_the_pages_and_the_examples_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        members = [member for member in archive if member.isfile()]
        contents = [reader.read() for member in members if (reader := archive.extractfile(member))]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name for name in tracked.stdout.split() if name.startswith(("src/", "docs/", "examples/"))}
    assert wanted | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "bench", "tools", "."))]
    assert not [content for content in contents if b"PRIVATE KEY" + b"-----" in content]


def test_it_holds_code_and_the_dashboard_and_no_key(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        data = [name for name in names if Path(name).suffix not in (".py", ".typed")]
        assert data == ["segue/server/frontend/dashboard.html"]
        assert not [name for name in names if b"PRIVATE KEY" + b"-----" in archive.read(name)]
    assert not [name for name in names if not name.startswith("segue/")]


def test_its_metadata_says_who_what_and_for_whom(wheel: Path) -> None:
    said = metadata(wheel)
    assert said["Author"] == "segue contributors"
    assert said["Requires-Python"] == ">=3.11"
    assert said["License-Expression"] == "Apache-2.0"
    assert len(said.get_all("Classifier") or []) > 5
    assert said["Keywords"]
    text = said.get_payload()
    assert isinstance(text, str)
    assert "segue.kv" in text
    assert re.findall(r"\]\((?!https?:)", text) == [], "a relative link leads nowhere outside the repository"


def test_the_library_needs_three_packages(library: Path) -> None:
    code = "import importlib.metadata as m; print(*sorted(d.name.lower() for d in m.distributions()))"
    assert set(run(library, "-c", code).stdout.split()) == {"segue", *LIBRARY}


@pytest.mark.parametrize(
    ("example", "last"),
    [
        ("handover.py", "first token 42, KV equal"),
        ("killed_peer.py", "a new peer: SUCCESS, 40 pages free"),
        ("own_memory.py", "KV equal"),
        ("rank_worker.py", "KV of both ranks equal"),
    ],
)
def test_examples_run_with_the_library_alone(library: Path, example: str, last: str) -> None:
    done = run(library, str(ROOT / "examples" / example))
    assert (done.returncode, done.stdout.splitlines()[-1:], done.stderr) == (0, [last], "")


REGISTRY = ("--registry", "http://127.0.0.1:1")
#: Each command with arguments that it takes, and the extras that it needs.
COMMANDS = [
    (("serve",), "serve,engine"),
    (("prefill", "--model", "m"), "serve,engine"),
    (("decode", "--model", "m"), "serve,engine"),
    (("unified", "--model", "m"), "serve,engine"),
    (("frontend", *REGISTRY), "serve,engine"),
    (("ps", *REGISTRY), "serve"),
    (("top", "http://127.0.0.1:1"), "serve"),
    (("drain", *REGISTRY, "3fa94c01"), "serve"),
    (("resume", *REGISTRY, "3fa94c01"), "serve"),
    (("switch", *REGISTRY, "3fa94c01", "decode"), "serve"),
    (("explain", *REGISTRY, "req-1"), "serve"),
    (("bench", "http://127.0.0.1:1"), "serve"),
    (("doctor",), "serve"),
    (("keys", "tls"), "keys"),
]


#: Commands of the repository that the wheel lacks.
OUTSIDE = ("sim", "advise")


def test_all_commands_are_tried() -> None:
    assert {words[0] for words, _ in COMMANDS} == {*parser()[1]} - {"version", *OUTSIDE}


@pytest.mark.parametrize(("words", "extras"), COMMANDS, ids=[words[0] for words, _ in COMMANDS])
def test_a_command_without_its_extra_says_which(library: Path, words: tuple[str, ...], extras: str) -> None:
    done = run(library, "-m", "segue.cli.main", *words)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"segue: segue {words[0]} needs the ")
    assert line.endswith(f"not installed): pip install 'segue[{extras}]'")


@pytest.mark.parametrize("command", OUTSIDE)
def test_a_command_outside_the_wheel_says_where_it_is(library: Path, command: str) -> None:
    done = run(library, "-m", "segue.cli.main", command, "--seed", "1")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"segue: segue {command} is in segue's repository")
    assert line.endswith("'pip install ./lab'")


def test_help_and_version_need_nothing(library: Path) -> None:
    for words in (("--help",), ("serve", "--help"), ("version",)):
        done = run(library, "-m", "segue.cli.main", *words)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def everything(wheel: Path, tmp_path: Path) -> Path:
    """The Python of an environment with the wheel and exactly the packages of `segue[all]`, as links to those
    of this environment: a download of them takes longer than CI has."""
    venv.create(tmp_path / "all", with_pip=False, symlinks=True)
    python = tmp_path / "all" / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", str(wheel))
    [packages] = (tmp_path / "all" / "lib").glob("python*/site-packages")
    wanted, seen = [Requirement("segue[all]")], set[str]()
    while wanted:
        requirement = wanted.pop()
        if (key := f"{requirement.name} {sorted(requirement.extras)}") in seen:
            continue
        seen.add(key)
        found = distribution(requirement.name)
        lines = metadata(wheel).get_all("Requires-Dist") if requirement.name == "segue" else found.requires
        for line in lines or []:
            needed = Requirement(line)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(needed)
        if requirement.name != "segue":
            for top in {Path(file).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    return python


def test_segue_serve_and_bench_run_from_the_wheel(everything: Path, tiny: Path, tmp_path: Path) -> None:
    where = run(everything, "-c", "import segue; print(segue.__file__)").stdout
    assert str(tmp_path) in where
    serve = [everything, "-m", "segue.cli.main", "serve", str(tiny), "--port", "0", "--dtype", "float32"]
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRON, cwd=tmp_path
    ) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("ready http://"):
                    break
            else:
                pytest.fail("".join(said))
            url = said[-1].split()[1]
            bench = run(
                everything, "-m", "segue.cli.main", "bench", url, "--requests", "2", "--output-tokens", "2"
            )
            assert (bench.returncode, bench.stderr) == (0, ""), bench.stderr
        finally:
            process.terminate()
            process.communicate(timeout=120)
    assert process.returncode == 0
