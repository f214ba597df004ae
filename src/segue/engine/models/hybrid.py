"""Families whose sequences keep a state beside their KV: some layers have no attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from segue.engine.models.model_registry import ModelFamily, refuse_layers
from segue.kv import ConfigError, StateTensor


class HybridFamily(ModelFamily):
    """A family some of whose layers are a short convolution, with or without `sums` over what comes out."""

    has_state = True
    #: The name in transformers of the layers that keep a state.
    state_layer: ClassVar[str]
    #: The option that says how many positions the convolution of such a layer sees.
    width: ClassVar[str]

    def attentions(self, values: Mapping[str, Any]) -> Collection[int]:
        """The layers of attention of a configuration that does not list the type of each layer."""
        raise NotImplementedError

    def channels(self, values: Mapping[str, Any]) -> int:
        """The channels of the convolution of a layer."""
        raise NotImplementedError

    def sums(self, values: Mapping[str, Any], layers: int) -> tuple[StateTensor, ...]:
        """The state of `layers` layers besides the convolution's inputs."""
        return ()

    def layer_types(self, values: Mapping[str, Any]) -> list[str]:
        """The type of each layer, by transformers' names."""
        if (found := values.get("layer_types")) is not None:
            return list(found)
        attentions = self.attentions(values)
        every = range(values["num_hidden_layers"])
        return ["full_attention" if index in attentions else self.state_layer for index in every]

    def check(self, values: Mapping[str, Any]) -> None:
        """See `ModelFamily.check`."""
        kinds = self.layer_types(values)
        refuse_layers(kinds, {self.state_layer, "full_attention"})
        if "full_attention" not in kinds:
            raise ConfigError(
                "the model has no layer of full attention, which is not supported: it has no KV"
            )
        if self.state_layer in kinds and values.get(self.width, 2) < 2:
            raise ConfigError(f"the model sets {self.width} = {values[self.width]}; at least 2 is supported")

    def kv_layers(self, values: Mapping[str, Any]) -> int:
        """See `ModelFamily.kv_layers`."""
        return self.layer_types(values).count("full_attention")

    def state(self, values: Mapping[str, Any], dtype: str, item_bytes: int) -> tuple[StateTensor, ...]:
        """See `ModelFamily.state`. `conv` has the inputs of the last positions of each convolution, the
        oldest first, `[positions, channels]`."""
        layers = self.layer_types(values).count(self.state_layer)
        if not layers:
            return ()
        shape = (values[self.width] - 1, self.channels(values))
        conv = StateTensor(name="conv", layers=layers, shape=shape, dtype=dtype, item_bytes=item_bytes)
        return (conv, *self.sums(values, layers))
