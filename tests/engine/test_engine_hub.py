"""Models of the Hub, from a hub of our own: what is fetched, what is kept, and every way it can fail."""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, file_download
from safetensors.torch import save_file

from hub_server import Hub, Repository, serve
from segue.engine.models import hub
from segue.engine.models.model_store import resolve_model
from segue.kv.errors import ConfigError

NAME = "org/tiny"
WEIGHT_BYTES = 3 * 2**20


def write_model(folder: Path, *, model_type: str = "llama", seed: int = 0, **config: object) -> Path:
    """A folder that is a complete model for whoever does not load it, with much beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    torch.manual_seed(seed)
    save_file({"a": torch.randn(WEIGHT_BYTES // 4)}, folder / "model.safetensors")
    for other in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "model.gguf", "x.onnx"):
        (folder / other).write_bytes(b"not needed")
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with one model; its cache is this test's own."""
    with serve() as made:
        made.add(NAME, write_model(tmp_path / "source"))
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        # This process has read its environment already.
        at(made.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in (
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
            "HF_TOKEN_PATH",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        yield made


def at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process ask the hub at `url`."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    resolve_at = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve_at)


#: A process that fetches the model and prints its progress.
FETCHING = [
    sys.executable,
    "-c",
    "from segue.engine.models.model_store import resolve_model\n"
    f"resolve_model({NAME!r}, progress=lambda *step: print(*step, flush=True))",
]


def refusal(name: str = NAME, revision: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, revision=revision)
    text = str(caught.value)
    assert "\n" not in text
    return text


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def parts(tmp_path: Path) -> list[str]:
    """The unfinished files of the cache."""
    return [
        path.name for path in (tmp_path / "hf").rglob("*") if "part" in path.name or "incomplete" in path.name
    ]


NEEDED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


@pytest.mark.slow
def test_what_is_needed_is_fetched_once_into_hugging_faces_cache(here: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = resolve_model(NAME, progress=lambda *step: seen.append(step))
    commit = here.repositories[NAME].refs["main"]
    assert folder == tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / commit
    assert files(folder) == NEEDED
    assert (folder / "model.safetensors").read_bytes() == (
        tmp_path / "source" / "model.safetensors"
    ).read_bytes()
    assert (folder / "model.safetensors").is_symlink()
    assert parts(tmp_path) == []
    downloaded = [(done, total) for stage, done, total in seen if stage == "download"]
    assert downloaded == sorted(downloaded)
    assert downloaded[-1][0] == downloaded[-1][1] > WEIGHT_BYTES
    assert len([done for done, _ in downloaded if 0 < done < WEIGHT_BYTES]) >= 2, downloaded
    before = len(here.got("GET", "/resolve/"))
    assert resolve_model(NAME) == folder
    assert len(here.got("GET", "/resolve/")) == before


@pytest.mark.slow
def test_what_another_program_has_fetched_is_not_fetched_again(here: Hub) -> None:
    code = f"from huggingface_hub import snapshot_download as s; print(s({NAME!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    before = len(here.got("GET", ".safetensors"))
    assert str(resolve_model(NAME)) == done.stdout.strip()
    assert len(here.got("GET", ".safetensors")) == before


@pytest.mark.slow
def test_a_frontend_fetches_no_weights(here: Hub) -> None:
    assert files(resolve_model(NAME, weights=False)) == NEEDED - {"model.safetensors"}
    assert here.got("GET", ".safetensors") == []
    assert files(resolve_model(NAME)) == NEEDED


@pytest.mark.slow
def test_shards_are_those_that_the_index_names_and_bin_is_the_last_choice(here: Hub, tmp_path: Path) -> None:
    source = write_model(tmp_path / "sharded")
    (source / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, shard in enumerate(shards):
        save_file({str(i): torch.zeros(4)}, source / shard)
    save_file({"x": torch.zeros(4)}, source / "model-00003-of-00003.safetensors")
    index = {"weight_map": {str(i): shard for i, shard in enumerate(shards)}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    here.add("org/sharded", source)
    small = NEEDED - {"model.safetensors"}
    assert files(resolve_model("org/sharded")) == small | {*shards, "model.safetensors.index.json"}
    (source / shards[1]).unlink()
    here.add("org/lacks", source)
    assert f"names {shards[1]}, which it does not have" in refusal("org/lacks")
    for path in source.glob("*.safetensors*"):
        path.unlink()
    here.add("org/old", source)
    assert files(resolve_model("org/old")) == small | {"pytorch_model.bin"}


# ---- interruptions ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_connection_that_breaks_goes_on_where_it_was(here: Hub, tmp_path: Path) -> None:
    here.cut["model.safetensors"] = 2**20
    folder = resolve_model(NAME)
    assert (folder / "model.safetensors").read_bytes() == (
        tmp_path / "source" / "model.safetensors"
    ).read_bytes()
    assert [request[2] for request in here.got("GET", ".safetensors")] == ["", f"bytes={2**20}-"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_ended_is_continued_by_the_next(
    here: Hub, tmp_path: Path, number: signal.Signals
) -> None:
    here.cut["model.safetensors"], here.hold = 2**20 + 12345, True
    with subprocess.Popen(FETCHING, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        assert here.held.wait(60)
        wait_for_bytes(tmp_path, 2**20)
        first.send_signal(number)
        assert first.wait(30) == -number  # although its thread waits for the connection
    here.hold = False
    here.released.set()
    [kept] = list((tmp_path / "hf").rglob("*.segue-part"))
    size = kept.stat().st_size
    assert size == 2**20
    # Offline, what is half there is not taken for complete.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "no weights" in refusal()
    folder = resolve_model(NAME)
    assert (folder / "model.safetensors").read_bytes() == (
        tmp_path / "source" / "model.safetensors"
    ).read_bytes()
    assert here.got("GET", ".safetensors")[-1][2] == f"bytes={size}-"
    assert parts(tmp_path) == []


def wait_for_bytes(tmp_path: Path, count: int) -> None:
    """Until so much of the weights is on the disk; nobody tells a test of it."""
    for _ in range(6000):
        found = list((tmp_path / "hf").rglob("*.segue-part"))
        if found and found[0].stat().st_size >= count:
            return
        with socket.socket() as nobody:
            nobody.settimeout(0.01)
            nobody.bind(("127.0.0.1", 0))
            nobody.listen()
            with pytest.raises(TimeoutError):
                nobody.accept()
    raise AssertionError("the part did not grow")


@pytest.mark.slow
def test_two_at_once_fetch_once(here: Hub, tmp_path: Path) -> None:
    here.cut["model.safetensors"], here.hold = 2**20, True
    with subprocess.Popen(FETCHING, stdout=subprocess.PIPE, text=True) as first:
        assert here.held.wait(60)
        here.hold = False
        with subprocess.Popen(FETCHING, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert any(line == "wait 0 0\n" for line in iter(second.stdout.readline, ""))
            here.released.set()
            assert first.wait(60) == 0
            assert second.wait(60) == 0
    assert len(here.got("GET", ".safetensors")) == 2, "one that was cut, and its rest"
    assert parts(tmp_path) == []


@pytest.mark.slow
def test_content_with_another_checksum_is_refused_and_not_kept(here: Hub, tmp_path: Path) -> None:
    here.spoil.add("model.safetensors")
    assert "another checksum" in refusal()
    assert parts(tmp_path) == []
    here.spoil.clear()
    assert files(resolve_model(NAME)) == NEEDED


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_no_part(here: Hub, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        text = refusal()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "There is no room for 'org/tiny'" in text
    assert "HF_HOME" in text
    assert parts(tmp_path) == []
    assert files(resolve_model(NAME)) == NEEDED


def test_too_little_room_is_seen_before_the_weights_come(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    text = refusal()
    assert "There is no room for 'org/tiny'" in text
    assert "needed" in text
    assert here.got("GET", ".safetensors") == []


# ---- revisions ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_revision_is_pinned_by_branch_tag_or_commit(here: Hub, tmp_path: Path) -> None:
    repository = here.repositories[NAME]
    first = repository.refs["main"]
    newer = write_model(tmp_path / "newer", seed=1)
    second = repository.commit({p.name: p.read_bytes() for p in newer.iterdir()}, "main", "v2")
    assert resolve_model(NAME).name == second
    assert resolve_model(NAME, revision="v2").name == second
    old = resolve_model(NAME, revision=first)
    assert old.name == first
    assert (old / "model.safetensors").read_bytes() == (
        tmp_path / "source" / "model.safetensors"
    ).read_bytes()
    assert "has no revision 'v3'" in refusal(revision="v3")
    # A commit that is complete here is taken without a question.
    asked = len(here.seen)
    assert resolve_model(NAME, revision=first) == old
    assert len(here.seen) == asked


@pytest.mark.parametrize("name", ["smollm2", "source", "./source", "x.gguf"])
def test_a_revision_of_what_is_not_of_the_hub_is_refused(here: Hub, name: str) -> None:
    assert "--revision is of a model of the Hub" in refusal(name, "v1")


def test_a_folder_that_is_here_wins_over_the_hub(here: Hub, tmp_path: Path) -> None:
    local = write_model(tmp_path / "org" / "tiny")
    assert resolve_model(NAME) == local
    assert here.seen == []
    assert "--revision" in refusal(NAME, "main")


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        ({"model_type": "gpt_neox"}, "models of type 'gpt_neox' are not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_cannot_run_is_refused_before_its_weights_come(
    here: Hub, tmp_path: Path, config: dict[str, object], fragment: str
) -> None:
    here.add("org/other", write_model(tmp_path / "other", **config))  # type: ignore[arg-type]
    text = refusal("org/other")
    assert "'org/other' cannot run here" in text
    assert fragment in text
    assert [request[1].rsplit("/", 1)[1] for request in here.got("GET", "/resolve/")] == ["config.json"]


@pytest.mark.slow
def test_a_repository_that_is_no_model_says_what_to_do(here: Hub) -> None:
    here.repositories["org/x-GGUF"] = Repository()
    here.repositories["org/x-GGUF"].commit({"x.gguf": b"GGUF"}, "main")
    assert "--model FILE.gguf" in refusal("org/x-GGUF")


@pytest.mark.slow
def test_an_unknown_name_and_one_that_is_hidden_are_one_sentence(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.add("org/private", tmp_path / "source", token="secret-token")
    for name in ("org/unknown", "org/private"):
        text = refusal(name)
        assert f"There is no model '{name}': no such folder here, and {here.url} shows none" in text
        assert "HF_TOKEN is not set" in text
    monkeypatch.setenv("HF_TOKEN", "wrong-token")
    assert "the token in HF_TOKEN" in refusal("org/private")
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    assert files(resolve_model("org/private")) == NEEDED


@pytest.mark.slow
def test_a_gated_model_says_where_to_ask(here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here.add("org/gated", tmp_path / "source", token="secret-token", gated=True)
    for token, said in (("", "no token (HF_TOKEN is not set)"), ("wrong-token", "the token in HF_TOKEN")):
        monkeypatch.setenv("HF_TOKEN", token)
        text = refusal("org/gated")
        assert "'org/gated' is gated" in text
        assert said in text
        assert f"{here.url}/org/gated" in text
        assert "wrong-token" not in text
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    assert files(resolve_model("org/gated")) == NEEDED


# ---- away ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_is_not_well_costs_nobody_what_is_here(
    here: Hub, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    here.broken = status
    text = refusal()
    assert f"{here.url} cannot be reached" in text
    assert "not in the cache" in text
    here.broken = 0
    folder = resolve_model(NAME)
    here.broken = status
    assert resolve_model(NAME) == folder
    assert "is taken from the cache" in caplog.text


@pytest.mark.slow
def test_an_endpoint_that_is_down_is_one_sentence(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(NAME)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        at(f"http://127.0.0.1:{nobody.getsockname()[1]}", monkeypatch)
        assert resolve_model(NAME) == folder
        assert "cannot be reached" in refusal("org/unknown")


@pytest.mark.slow
def test_offline_what_is_complete_in_the_cache_is_taken_and_nothing_is_asked(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal()
    assert here.seen == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = resolve_model(NAME)
    asked = len(here.seen)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(NAME) == folder
    assert resolve_model(NAME, revision=folder.name) == folder
    assert "not in the cache" in refusal(revision="v9")
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal()
    assert len(here.seen) == asked


# ---- silence ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hub_that_falls_silent_is_left_and_its_file_is_free(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "SILENCE_S", 1.0)
    here.cut["model.safetensors"], here.hold = 2**20, True
    assert "Fetching 'org/tiny' stopped: nothing came" in refusal()
    monkeypatch.setattr(hub, "SILENCE_S", 300.0)
    here.hold = False
    here.released.set()
    assert files(resolve_model(NAME)) == NEEDED


def test_who_waits_for_another_process_is_patient(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (tmp_path / "source" / "model.safetensors").read_bytes()
    blobs = tmp_path / "hf" / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    waiting, waits, wait = threading.Event(), [], concurrent.futures.wait

    def ends_at_once(futures: Any, timeout_s: float) -> Any:
        """A hundred waits end at once; after them the file is free."""
        assert waiting.wait(60)
        waits.append(timeout_s)
        if len(waits) == 100:
            fcntl.flock(lock, fcntl.LOCK_UN)
        return wait(futures, 60 if len(waits) >= 100 else 0)

    monkeypatch.setattr(hub, "wait", ends_at_once)
    with (blobs / f"{hashlib.sha256(content).hexdigest()}.segue-part").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = resolve_model(NAME, progress=lambda stage, *_: waiting.set() if stage == "wait" else None)
    assert files(folder) == NEEDED


def test_what_came_while_this_process_was_stopped_is_taken(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that a stop has outlasted ends without a look."""
    stopped, wait = [0.0], concurrent.futures.wait
    monkeypatch.setattr(hub, "wait", lambda futures, _: wait(futures, stopped.pop() if stopped else 60))
    assert files(resolve_model(NAME)) == NEEDED
    assert not stopped


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("https://hub.example/org/tiny/blob", True),
        ("https://cdn.example/org/tiny/blob?signed", False),
        ("http://hub.example/org/tiny/blob", False),
        ("https://hub.example:8443/org/tiny/blob", False),
    ],
    ids=["the hub itself", "another host", "another scheme", "another port"],
)
def test_the_token_is_told_to_nobody_but_the_hub(
    location: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, str]] = []

    def http_get(_url: str, out: Any, *, headers: dict[str, str], **_: Any) -> None:
        asked.append(headers)
        out.write(b"x")

    about = SimpleNamespace(etag=hashlib.sha256(b"x").hexdigest(), size=1, location=location)
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *_, **__: "https://hub.example/org/tiny/file")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda _url: about)
    monkeypatch.setattr(file_download, "http_get", http_get)
    monkeypatch.setattr(
        "huggingface_hub.utils.build_hf_headers", lambda: {"authorization": "Bearer ours", "user-agent": "x"}
    )
    hub.download_weights(NAME, "model.safetensors", tmp_path / "snapshots" / "a", lambda *_: None, None)
    assert asked == [{"user-agent": "x"} | ({"authorization": "Bearer ours"} if told else {})]
