"""`segue serve ORG/NAME` from a hub of our own to an answer, with a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from served import Served, refused

import hub_server
from ports import HeldPort

NAME = "org/tiny"
SMALL = ("--dtype", "float32", "--kv-gib", "0.01", "--threads-per-worker", "1")


@pytest.fixture(scope="module")
def hub(tiny: Path) -> Iterator[hub_server.Hub]:
    with hub_server.serve() as made:
        made.add(NAME, tiny)
        yield made


def environ(hub: hub_server.Hub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.slow
def test_a_name_of_the_hub_is_served_under_that_name(hub: hub_server.Hub, tmp_path: Path) -> None:
    with Served(NAME, *SMALL, "--port", "0", environ=environ(hub, tmp_path)) as served:
        answer = ask(served.url, NAME)
        assert answer.status_code == 200, answer.text
        [listed] = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"]
        assert listed["id"] == NAME
        assert httpx.get(f"{served.url}/v1/models/{NAME}", timeout=60).json()["id"] == NAME
        assert f"served_model={NAME}" in served.log()
        assert "segue: download tiny" in served.log()
        assert served.stop() == 0
    text = answer.json()["choices"][0]["text"]
    # Offline, by --model, with another name and revision, in one process for both halves: the same model.
    commit = hub.repositories[NAME].refs["main"]
    more = ("--model", NAME, "--revision", commit, "--served-model-name", "mine")
    with Served(
        *more, *SMALL, "--unified", "--port", "0", environ=environ(hub, tmp_path) | {"HF_HUB_OFFLINE": "1"}
    ) as again:
        assert ask(again.url, NAME).status_code == 404
        assert ask(again.url, "mine").json()["choices"][0]["text"] == text


@pytest.mark.slow
def test_parts_by_hand_take_the_name_too_and_the_frontend_only_the_tokenizer(
    hub: hub_server.Hub, tmp_path: Path
) -> None:
    held = HeldPort()
    port = held.port
    url = f"http://127.0.0.1:{port}"
    here = environ(hub, tmp_path / "instances")
    with (
        Served(
            NAME, "--bootstrap-port", str(port), *SMALL, command="prefill", environ=here, wait=False
        ) as prefill,
        Served(NAME, "--registry", url, *SMALL, command="decode", environ=here, wait=False) as decode,
        Served(
            NAME,
            "--registry",
            url,
            "--port",
            "0",
            command="frontend",
            environ=environ(hub, tmp_path / "front"),
        ) as frontend,
    ):
        prefill.ready()
        decode.ready()
        answer = ask(frontend.url, NAME)
        assert answer.status_code == 200, answer.text
        for part in (frontend, decode, prefill):
            assert part.stop() == 0
    assert list((tmp_path / "instances").rglob("snapshots/*/*.safetensors"))
    assert not list((tmp_path / "front").rglob("*.safetensors"))


@pytest.mark.slow
def test_a_pool_as_small_as_the_sentence_says_serves(tiny: Path) -> None:
    words = ["--model", str(tiny), "--dtype", "float32", "--port", "0", "--page-tokens", "128"]
    last = refused("serve", *words, "--kv-gib", "0.00001").splitlines()[-1]
    assert "--kv-gib 1e-05 holds" in last
    least = last.rpartition(" ")[2]
    with Served(
        *words, "--kv-gib", least, "--threads-per-worker", "1", "--served-model-name", "tiny"
    ) as served:
        assert ask(served.url, "tiny").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (("org/unknown",), "There is no model 'org/unknown'"),
        ((NAME, "--revision", "v9"), "has no revision 'v9'"),
        ((NAME, "--model", "other"), "was given two models, org/tiny and --model other"),
        (("smollm2", "--revision", "v9"), "--revision is of a model of the Hub"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    hub: hub_server.Hub, tmp_path: Path, words: tuple[str, ...], fragment: str
) -> None:
    told = refused("serve", *words, "--port", "0", environ=environ(hub, tmp_path))
    assert fragment in told.splitlines()[-1]
