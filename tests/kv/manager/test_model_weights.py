"""The identity of weights: every byte counts, and what was read once is not read again."""

from __future__ import annotations

import errno
import json
import os
import random
import tempfile
from pathlib import Path
from typing import IO

import pytest

from segue.kv import ConfigError, model_fingerprint, weights_digest
from segue.kv.model_weights import RECORD

MIB = 2**20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(folder: Path, size: int, fill: bytes = b"a") -> Path:
    """A file of weights that was changed before the present tick of the file system's clock."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    file.write_bytes(fill * size)
    settle(file)
    return file


def settle(file: Path) -> None:
    probe = file.with_name("probe")
    probe.touch()
    while probe.stat().st_mtime_ns <= file.stat().st_ctime_ns:
        probe.touch()
    probe.unlink()


def kept(place: Path) -> dict[str, list[object]]:
    found: dict[str, list[object]] = json.loads(place.read_text())
    return found


def test_two_fine_tunes_with_equal_names_and_sizes_differ(tmp_path: Path) -> None:
    written(tmp_path / "a", 1000)
    written(tmp_path / "b", 1000, b"b")
    written(tmp_path / "c", 1000)
    digests = [weights_digest(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[2] != digests[1]
    assert weights_digest(tmp_path / "a" / "model.safetensors") == digests[0]
    assert weights_digest(tmp_path) is None
    assert not (tmp_path / "a" / RECORD).exists(), "a small file is read each time"


def test_a_change_of_64_kib_in_64_mib_is_always_seen(tmp_path: Path) -> None:
    file = written(tmp_path / "a", 64 * MIB)
    rng, seen = random.Random(1), {weights_digest(tmp_path / "a")}
    for at in (0, 64 * MIB - 64 * 1024, *(rng.randrange(63 * MIB) for _ in range(4))):
        with file.open("r+b") as content:
            content.seek(at)
            content.write(rng.randbytes(64 * 1024))
        seen.add(weights_digest(tmp_path / "a"))
    assert len(seen) == 7


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    file = written(tmp_path / "a", 16 * MIB)
    before = weights_digest(tmp_path / "a")
    place = tmp_path / "a" / RECORD
    record = kept(place)
    assert weights_digest(tmp_path / "a") == before
    record[file.name][-1] = "what the record says"
    place.write_text(json.dumps(record))
    assert weights_digest(tmp_path / "a") != before, "the file was read again"
    for broken in ("", "{", "[1]", '{"model.safetensors": [1]}', '{"model.safetensors": 7}'):
        place.write_text(broken)
        assert weights_digest(tmp_path / "a") == before


@pytest.mark.parametrize("how", ["in place", "with its old time", "replaced"])
def test_a_changed_file_is_read_again(tmp_path: Path, how: str) -> None:
    file = written(tmp_path / "a", 16 * MIB)
    before, times = weights_digest(tmp_path / "a"), file.stat()
    assert file.name in kept(tmp_path / "a" / RECORD)
    if how == "replaced":
        new = file.with_name("new")
        new.write_bytes(b"b" * 16 * MIB)
        new.replace(file)
    else:
        with file.open("r+b") as content:
            content.write(b"b")
    if how != "in place":
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_digest(tmp_path / "a") != before


def test_a_file_that_was_just_changed_is_not_kept(tmp_path: Path) -> None:
    """A second change within the same tick of the clock could not be seen."""
    file = written(tmp_path / "a", 16 * MIB)
    later = file.stat().st_ctime_ns + 10**12
    os.utime(file, ns=(later, later))
    seen = set()
    for fill in (b"b", b"c", b"d"):
        with file.open("r+b") as content:
            content.write(fill)
        seen.add(weights_digest(tmp_path / "a"))
    assert len(seen) == 3


def test_the_record_of_a_read_only_folder_is_in_segues_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, read_only = written(tmp_path / "a", 16 * MIB), {tmp_path / "a"}
    original = tempfile.TemporaryFile

    def temporary(*, dir: Path) -> IO[bytes]:
        if dir in read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return original(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary)
    cache.mkdir()
    (cache / "weights").mkdir()
    settle(file)
    before = weights_digest(tmp_path / "a")
    [place] = (cache / "weights").iterdir()
    assert kept(place)[file.name][0] == 16 * MIB
    assert weights_digest(tmp_path / "a") == before
    assert not (tmp_path / "a" / RECORD).exists()
    place.unlink()
    read_only.add(cache / "weights")
    assert weights_digest(tmp_path / "a") == before
    assert "can be kept nowhere" in caplog.text


def test_weights_that_cannot_be_read_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"the weights in .* cannot be read"):
        weights_digest(tmp_path)


def test_a_fingerprint_covers_the_configuration_and_all_facts() -> None:
    found = {
        model_fingerprint({"layers": 2}, "a"),
        model_fingerprint({"layers": 3}, "a"),
        model_fingerprint({"layers": 2}, "b"),
        model_fingerprint({"layers": 2}, "a", "a draft model's"),
    }
    assert len(found) == 4
    assert model_fingerprint({"layers": 2, "transformers_version": "5"}, "a") in found


@pytest.mark.timeout(20)
def test_a_named_pipe_is_neither_a_record_nor_weights(tmp_path: Path) -> None:
    """To open one waits for a writer, who never comes."""
    file = written(tmp_path / "a", 1000)
    before = weights_digest(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / RECORD)
    assert weights_digest(tmp_path / "a") == before
    os.mkfifo(file.with_name("more.safetensors"))
    with pytest.raises(ConfigError, match=r"more\.safetensors is no file"):
        weights_digest(tmp_path / "a")
