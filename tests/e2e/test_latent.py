"""`segue serve` with a model of multi-head latent attention: tokens equal generate, over both transports."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_model
from engine_models import GROUPS, LATENT, generate
from served import Served
from test_serve import completion, token_ids
from transformers import DeepseekV3Config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OPTIONS = ("--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1", "--port", "0")
COUNT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**LATENT, **GROUPS, "vocab_size": tiny_model.VOCAB, "initializer_range": 0.2}
    return tiny_model.save(tmp_path_factory.mktemp("latent"), DeepseekV3Config(**sizes))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.soak)])
def test_a_deepseek_folder_is_served(folder: Path, transport: str) -> None:
    draw = random.Random(3)
    asked = [[draw.randrange(3, 250) for _ in range(n)] for n in (1, 15, 16, 17, 64, 100, 300)]
    wanted = generate(folder, asked, COUNT)
    how = ("--model", str(folder), "--served-model-name", "latent", "--transport", transport)
    with Served(*OPTIONS, *how, "--chunk-tokens", "64") as made, ThreadPoolExecutor(8) as pool:

        def answer(prompt: list[int]) -> list[int]:
            return token_ids(completion(made.url, prompt, COUNT, model="latent"))

        assert list(pool.map(answer, asked)) == wanted
        # Once more: the prefix is there on both sides, and only the tail is computed and sent.
        assert answer(asked[-1]) == wanted[-1]
        assert made.stop() == 0
