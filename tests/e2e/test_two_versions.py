"""A hand-off between this tree and the wheel of an earlier version, where the ranges of versions meet."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import msgspec
import pytest

from segue.kv.protocol.messages import HANDOFF_VERSIONS
from segue.kv.session.frames import SESSION_VERSIONS
from segue.kv.versions import Versions

ROOT = Path(__file__).resolve().parents[2]
TAG = "v0.2.0"
pytestmark = pytest.mark.slow

#: Prints the ranges that a version speaks, the session's first.
RANGES = (
    "import msgspec; from segue.kv.session.frames import SESSION_VERSIONS as s; "
    "from segue.kv.protocol.messages import HANDOFF_VERSIONS as h; "
    "print(msgspec.json.encode([s, h]).decode())"
)
#: Runs an example whose child process imports segue from another folder.
OTHER_CHILD = (
    "import os, runpy, sys; from segue import kv; child, example, *sys.argv[1:] = sys.argv[1:]; "
    "os.environ['PYTHONPATH'] = child; sys.argv[0] = example; runpy.run_path(example, run_name='__main__')"
)


def run(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python that imports segue from `source`."""
    environ = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the wheel of `TAG` installs."""
    archive = subprocess.run(["git", "archive", TAG], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"this clone has no tag {TAG}")
    folder = tmp_path_factory.mktemp("tagged")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder / "source", filter="data")
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "installed")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "installed"


@pytest.fixture(scope="module")
def apart(tagged: Path) -> list[Versions]:
    """The two ranges of the first protocol of which there is no common version; empty if there is none."""
    said = run(tagged, RANGES)
    if said.returncode != 0:
        pytest.skip(f"{TAG} says no range of versions")
    theirs = msgspec.json.decode(said.stdout, type=list[Versions])
    both = zip((SESSION_VERSIONS, HANDOFF_VERSIONS), theirs, strict=True)
    return next(([ours, other] for ours, other in both if ours.common(other) is None), [])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("older", ["prefill", "decode"])
def test_this_version_and_an_earlier_one_hand_over_or_say_why_not(
    tagged: Path, apart: list[Versions], older: str, transport: str
) -> None:
    decode, prefill = (ROOT / "src", tagged) if older == "prefill" else (tagged, ROOT / "src")
    done = run(decode, OTHER_CHILD, str(prefill), str(ROOT / "examples" / "handover.py"), transport)
    if apart:
        assert "protocol in common" in done.stderr
        assert [str(versions) in done.stderr for versions in apart] == [True, True]
    else:
        assert done.stdout.strip() == "first token 42, KV equal", done.stderr
