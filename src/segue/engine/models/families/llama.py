"""llama (Meta): the form that other families vary."""

from __future__ import annotations

from segue.engine.models.model_registry import ModelFamily


class Llama(ModelFamily):
    """See the module's text."""

    mapped = True


FAMILIES = {"llama": Llama()}
