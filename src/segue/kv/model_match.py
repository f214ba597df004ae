"""The identity of an instance's model: weights and number type. Pure."""

from __future__ import annotations

#: Characters of a fingerprint that are shown to a person.
_SHOWN = 16


def model_identity(fingerprint: str, dtype: str) -> str:
    """The `KVConfig.model` of segue's own engine: the `fingerprint` of configuration and weights, and the
    `dtype` that they are served in."""
    return f"{fingerprint}/{dtype}"


def model_difference(prefill: str, decode: str) -> tuple[str, str]:
    """The difference between the identities of the models of `prefill` and `decode`, as a sentence, and the
    flags that mend it."""
    (weights, _, dtype), (other_weights, _, other) = prefill.partition("/"), decode.partition("/")
    if weights == other_weights:
        common = "float32" if "float32" in (dtype, other) else dtype
        found = f"prefill serves this model in {dtype}, decode in {other}"
        return found, f"start both with --dtype {common} (auto depends on the processor)"
    found = f"prefill and decode serve different weights, {weights[:_SHOWN]} and {other_weights[:_SHOWN]}"
    return found, "start both with the same --model, --revision and --dtype"
