"""The model families that the engine runs, each in a file of `engine.models.families` of its own.

Every question about a family is an attribute or a method of `ModelFamily`, and a family's file says where its
answer differs. No other module reads `model_type`: to add a family, add a file and its test. Neither this
module nor a family's file imports torch at its top, because a model is checked before anything heavy is
imported.

A family is supported when a test compares its tokens with `transformers` generate. Any other family, and any
option of a family that the paged attention would not honour, is refused at start.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from segue.engine.models import families
from segue.kv import ConfigError, Internal, KVShape, StateTensor

#: Options that would change results and that nothing here honours.
_OPTIONS = ("attn_logit_softcapping", "use_bidirectional_attention", "quantization_config")


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Names of options: how many experts a layer has, how many inner items an expert has, and how many more
    experts compute every token (None: none do)."""

    count: str
    width: str
    shared: str | None = None


class ModelFamily:
    """How the models of one `model_type` are checked, loaded and computed; the defaults are llama's.

    `values` is the content of a config.json, of its text model alone; `config` is what transformers makes of
    it. Methods that take either raise KeyError, TypeError or ValueError for one that lacks what it must have.
    """

    #: Options and the only value of each that transformers computes; it ignores others without a word.
    only: ClassVar[Mapping[str, Any]] = {}
    #: Options that are whole numbers above zero.
    sizes: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    #: Where a layer may have experts.
    experts: ClassVar[ExpertOptions | None] = None
    #: Whether sequences keep a state beside their KV.
    has_state: ClassVar[bool] = False
    #: Whether files have each weight as transformers' layers do: nothing is merged when they are loaded, and
    #: nothing but the weights depends on their dtype.
    mapped: ClassVar[bool] = False
    #: Whether a norm multiplies with one plus its weight.
    one_plus_norms: ClassVar[bool] = False
    #: The name by which transformers' model calls the norm after its last layer.
    last_norm: ClassVar[str] = "norm"

    # ---- from the description alone --------------------------------------------------------------

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise a ConfigError for what `values` asks for and is not computed."""
        refuse_layers(values.get("layer_types") or (), {"full_attention", "sliding_attention"})

    def context_tokens(self, values: Mapping[str, Any]) -> int:
        """The longest sequence. A scaled rotary embedding makes it longer, as vLLM derives it: the original
        context times the factor."""
        longest = int(values["max_position_embeddings"])
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type")) not in ("linear", "yarn"):
            return longest
        original, factor = rope.get("original_max_position_embeddings") or longest, rope.get("factor") or 1
        if not isinstance(original, int | float) or not isinstance(factor, int | float) or factor > 10**6:
            raise ConfigError(f"the model's rope scaling is no pair of a length and a factor: {rope}")
        return max(longest, int(original * factor))

    def kv_layers(self, values: Mapping[str, Any]) -> int:
        """How many layers have KV."""
        return int(values["num_hidden_layers"])

    def kv_items(self, values: Mapping[str, Any]) -> int:
        """The items of KV per token and layer."""
        return 2 * _kv_heads(values) * _head_dim(values)

    def state(self, values: Mapping[str, Any], dtype: str, item_bytes: int) -> tuple[StateTensor, ...]:
        """The state of a sequence beside its KV, computed in `dtype`."""
        return ()

    def expert_layers(self, values: Mapping[str, Any]) -> int:
        """How many layers have experts."""
        return 0 if self.experts is None else int(values["num_hidden_layers"])

    def attention_costs(self, values: Mapping[str, Any]) -> tuple[int, float]:
        """Parameters of one layer's attention, and its operations for one token and one earlier one."""
        heads, dim = int(values["num_attention_heads"]), _head_dim(values)
        return 2 * int(values["hidden_size"]) * dim * (heads + _kv_heads(values)), 4.0 * heads * dim

    # ---- of a loaded model -----------------------------------------------------------------------

    def reshape(self, body: Any) -> None:
        """Change the modules of `body` (transformers' model without its head) in place to what the engine's
        layers take."""

    def kv_shape(
        self, attentions: Sequence[Any], values: Mapping[str, Any], dtype: str, item_bytes: int
    ) -> KVShape:
        """The KV of each layer, read off the attention modules; equal in all layers or refused."""
        kinds = {(attn.k_proj.out_features, attn.v_proj.out_features, attn.head_dim) for attn in attentions}
        if len(kinds) != 1:
            raise ConfigError(
                f"the model's layers have KV of different sizes ({sorted(kinds)}): not supported"
            )
        ((k_items, v_items, head_dim),) = kinds
        if k_items != v_items or k_items % head_dim:
            raise ConfigError(f"K of {k_items} and V of {v_items} items per token are not supported")
        return KVShape(
            layers=len(attentions),
            kv_heads=k_items // head_dim,
            k_dim=head_dim,
            v_dim=head_dim,
            dtype=dtype,
            item_bytes=item_bytes,
            state=self.state(values, dtype, item_bytes),
        )

    def windows(self, config: Any, attentions: Sequence[Any]) -> Sequence[int | None]:
        """The sliding window of each layer with KV, in tokens; None without one."""
        return [None] * len(attentions)

    def activation(self, config: Any) -> str:
        """The name of the activation function, by which transformers knows it."""
        return str(config.hidden_act)

    def turns_pairs(self, config: Any) -> bool:
        """Whether the rotary embedding of latent attention turns neighbouring items, not halves of a head."""
        return False


def _kv_heads(values: Mapping[str, Any]) -> int:
    return int(values.get("num_key_value_heads") or values["num_attention_heads"])


def _head_dim(values: Mapping[str, Any]) -> int:
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def refuse_layers(found: Sequence[str], known: set[str]) -> None:
    """Raise a ConfigError for layers that are of no `known` type."""
    if other := set(found) - known:
        raise ConfigError(f"the model has layers of type {sorted(other)}, which are not supported")


def known_families() -> dict[str, ModelFamily]:
    """Every supported family by its `model_type`, in alphabetic order: the `FAMILIES` of each file in
    `engine.models.families`."""
    known: dict[str, ModelFamily] = {}
    for file in pkgutil.iter_modules(families.__path__):
        for name, family in importlib.import_module(f"{families.__name__}.{file.name}").FAMILIES.items():
            if known.setdefault(name, family) is not family:
                raise Internal(f"{file.name} has a family {name!r}, as another file has")
    return dict(sorted(known.items()))


def type_of(values: Mapping[str, Any]) -> str | None:
    """The model type that the configuration names; None if it names none."""
    found = values.get("model_type")
    return found if isinstance(found, str) else None


def family_of(values: Mapping[str, Any]) -> ModelFamily | None:
    """The family of the configuration, None for one that is not supported."""
    return known_families().get(type_of(values) or "")


def supported_family(values: Mapping[str, Any]) -> ModelFamily:
    """The family of the configuration. Raises a ConfigError for one that is not supported, and for an option
    that would change results and is not honoured."""
    family, name = family_of(values), type_of(values)
    if family is None:
        known = known_families()
        hint = f" (its text model alone is {name}_text)" if f"{name}_text" in known else ""
        raise ConfigError(
            f"models of type {name!r} are not supported{hint}; supported are {', '.join(known)}"
        )
    for option in _OPTIONS:
        if values.get(option):
            raise ConfigError(f"the model sets {option} = {values[option]}, which is not supported")
    for option, only in family.only.items():
        if values.get(option) not in (None, only):
            raise ConfigError(
                f"the model sets {option} = {values[option]!r}, which is not supported: of {name}, {only!r} "
                "is"
            )
    family.check(values)
    return family


def refuse_unsupported(folder: Path) -> None:
    """Raise a ConfigError if `folder` holds no model or one that is not supported, by its config.json. Checks
    that need transformers run when the model is loaded."""
    supported_family(_read(folder))


def _read(folder: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        type_of(values)
    except (OSError, ValueError, AttributeError) as exc:
        raise ConfigError(f"{folder} is not a model folder: config.json cannot be read ({exc})") from exc
    return values


def check_experts(folder: Path, ranks: int) -> None:
    """Raise a ConfigError unless the model in `folder` has at least one expert for each of `ranks`."""
    values = _read(folder)
    options = supported_family(values).experts
    experts = int(values.get(options.count) or 0) if options is not None else 0
    if not experts:
        raise ConfigError(
            "--enable-expert-parallel shares out experts, and a model of type "
            f"{type_of(values)} has none; drop it, and the DP ranks are independent"
        )
    if experts < ranks:
        raise ConfigError(
            f"--enable-expert-parallel cannot share out {experts} experts over {ranks} DP ranks; give at "
            f"most --dp {experts}"
        )
