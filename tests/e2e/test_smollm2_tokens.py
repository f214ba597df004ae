"""The default model itself, in every arrangement of workers, transport and chunk: tokens equal generate.

`test_serve` shows some of these with short prompts; here all sixteen prompts of 1 to 2,000 tokens, at once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from served import Served
from test_serve import FLOAT32, completion, drawn, generated, token_ids

pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(900)]

#: More than the longest prompt, so that each is one chunk.
WHOLE = 4096


def prompts() -> list[list[int]]:
    """Sixteen of up to 2,000 tokens: a minute of computing for each of transformers and segue."""
    return drawn(1, 2, 15, 16, 17, 33, 64, 100, 130, 200, 257, 300, 350, 512, 700, 2000)


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """The right answers to `prompts()`."""
    return generated(prompts())


@pytest.mark.parametrize("chunk_tokens", [16, 64, WHOLE])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("each", [1, 2], ids=["1P1D", "2P2D"])
def test_sixteen_prompts_of_up_to_2000_tokens_at_once(
    each: int, transport: str, chunk_tokens: int, reference: list[list[int]]
) -> None:
    workers = ("--prefill", str(each), "--decode", str(each))
    how = ("--transport", transport, "--chunk-tokens", str(chunk_tokens))
    asked = prompts()
    assert (len(asked), max(map(len, asked))) == (16, 2000)
    with Served(*FLOAT32, *workers, *how) as made, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: completion(made.url, p, 8), asked))
        assert [token_ids(a) for a in answers] == reference
        # The longest once more: a prefix hit on both sides, its tail alone computed and sent.
        assert token_ids(completion(made.url, asked[-1], 8)) == reference[-1]
        assert made.stop() == 0
