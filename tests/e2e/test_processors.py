"""Deployments on processors weaker than this one: the first command of the README starts there, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import Served
from test_serve import SHORT, assert_right, completion, generated, token_ids

from emulated import below

pytestmark = [pytest.mark.timeout(300)]

SMALL = ("--kv-gib", "0.05", "--threads-per-worker", "1", "--port", "0", "--served-model-name", "smollm2")


@pytest.mark.parametrize(
    "ceiling", ["avx2", *(pytest.param(other, marks=pytest.mark.slow) for other in ("sse", "avx512"))]
)
def test_a_deployment_without_dtype_takes_float32_where_bfloat16_is_not_multiplied(
    ceiling: str, tiny: Path
) -> None:
    asked = [[token % 256 for token in prompt] for prompt in SHORT]
    served = Served("--model", str(tiny), *SMALL, environ=below(ceiling))
    assert "event=dtype dtype=float32 setting=auto reason='this processor does not" in served.log()
    assert "is slow here" not in served.log()
    assert_right(served, asked, generated(asked, tiny))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ceiling", "dtype"),
    [
        *((below, half) for below in ("avx2", "sse") for half in ("bfloat16", "float16")),
        ("avx512", "bfloat16"),
    ],
)
def test_a_type_that_is_named_is_served_with_one_warning(ceiling: str, dtype: str, tiny: Path) -> None:
    asked = [[token % 256 for token in prompt] for prompt in SHORT]
    served = Served("--model", str(tiny), *SMALL, "--dtype", dtype, environ=below(ceiling))
    assert served.log().count("is slow here") == 1
    # Rounding may choose another token here and there: that all are answered, and the same again, is enough.
    with served:
        answers = [[token_ids(completion(served.url, p, 8)) for p in asked[:4]] for _ in range(2)]
        assert answers[0] == answers[1]
        assert all(len(tokens) == 8 for tokens in answers[0])
        assert served.stop() == 0
