"""The difference between two models in one sentence."""

import pytest

from segue.kv.model_match import model_difference, model_identity

A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("prefill", "decode", "common"),
    [
        ("bfloat16", "float32", "float32"),
        ("float32", "float16", "float32"),
        ("float16", "bfloat16", "float16"),
    ],
)
def test_two_types_of_one_model_are_mended_by_one_flag(prefill: str, decode: str, common: str) -> None:
    found, mend = model_difference(model_identity(A, prefill), model_identity(A, decode))
    assert found == f"prefill serves this model in {prefill}, decode in {decode}"
    assert mend.startswith(f"start both with --dtype {common} ")


def test_two_models_are_named_by_the_beginning_of_their_fingerprints() -> None:
    found, mend = model_difference(model_identity(A, "float32"), model_identity(B, "bfloat16"))
    assert found == "prefill and decode serve different weights, aaaaaaaaaaaaaaaa and bbbbbbbbbbbbbbbb"
    assert mend == "start both with the same --model, --revision and --dtype"
