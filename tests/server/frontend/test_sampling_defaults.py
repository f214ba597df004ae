"""Fields that a client does not name are the model's, or OpenAI's; fields that it names are its own."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fleet_rig import FakeRegistry, Leader
from frontend_rig import FakeBackend, serve
from test_server import frontend_of

from segue.engine.request import SamplingParams
from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.server.frontend.sampling_defaults import OPENAI, SamplingDefaults, of_model
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.settings.shared_config import AnswersConfig

MODEL = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
}


def said(s: SamplingParams) -> SamplingDefaults:
    return SamplingDefaults(s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty)


def written(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1)),
        ({"temperature": None, "top_k": None}, SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1)),
        ({"temperature": 0}, SamplingDefaults(0.0, 0.9, 20, 0.05, 1.1)),
        # What is OpenAI's default is a choice where the model's is another.
        (
            {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1},
            OPENAI,
        ),
        ({"top_k": 0, "top_p": 0.5}, SamplingDefaults(0.6, 0.5, 0, 0.05, 1.1)),
    ],
)
def test_what_a_client_names_wins(
    path: str,
    named: dict[str, Any],
    expected: SamplingDefaults,
    backend: FakeBackend,
    tokenizer: ModelTokenizer,
) -> None:
    with serve(backend, tokenizer, defaults=SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1)) as door:
        answer = door.post(path, {**BODIES[path], **named})
    assert answer.status_code == 200, answer.text
    assert said(backend.requests[-1].sampling) == expected


@pytest.mark.parametrize(
    ("whose", "wanted"), [("model", SamplingDefaults(0.6, 0.9, 20, 0.0, 1.1)), ("openai", OPENAI)]
)
def test_a_frontend_reads_them_beside_its_tokenizer(
    model_folder: Path, tmp_path: Path, whose: str, wanted: SamplingDefaults
) -> None:
    folder = written(Path(shutil.copytree(model_folder, tmp_path / "model")), MODEL)
    answers = AnswersConfig(sampling_defaults=whose)

    async def main() -> SamplingParams:
        registry, stop = FakeRegistry(), asyncio.Event()
        ready: asyncio.Queue[str] = asyncio.Queue()
        prefill, decode = Leader(Role.PREFILL), Leader(Role.DECODE)
        try:
            # A task group: if the frontend fails, the test fails at once and with the frontend's exception.
            async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    frontend_of(folder, registry, stop, on_ready=ready.put_nowait, answers=answers)
                )
                for leader in (prefill, decode):
                    registry.put(await leader.start())
                url = await ready.get()
                async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                    path = "/v1/chat/completions"
                    assert (await http.post(path, json=BODIES[path])).status_code == 200
                stop.set()
        finally:
            for leader in (prefill, decode):
                await leader.node.close()
        return decode.submits[-1].request.sampling

    assert said(asyncio.run(main())) == wanted


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, OPENAI),
        ({}, OPENAI),
        ({"temperature": None, "eos_token_id": 2, "max_new_tokens": 7}, OPENAI),
        ({"temperature": 0}, SamplingDefaults(temperature=0)),
        ({"top_k": 50}, SamplingDefaults(top_k=50)),
        ({"top_k": 10**9}, SamplingDefaults(top_k=330)),
        ({"top_k": -1, "min_p": 0.1}, SamplingDefaults(min_p=0.1)),
    ],
)
def test_what_a_model_says(content: object, expected: SamplingDefaults, tmp_path: Path) -> None:
    if content is not None:
        written(tmp_path, content)
    assert of_model(tmp_path, 330) == expected


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ({"temperature": "hot"}, "temperature must be a number from 0 to 2, not 'hot'"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ('{"temperature": NaN}', "temperature"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": [0.1]}, "min_p"),
        ([1], "not a JSON object"),
        ('{"temperature"', "cannot be read"),
    ],
)
def test_what_no_client_could_say_is_refused_at_the_start(
    content: object, fragment: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        of_model(written(tmp_path, content), 330)
    assert fragment in str(caught.value)
    assert "--sampling-defaults openai" in str(caught.value)
