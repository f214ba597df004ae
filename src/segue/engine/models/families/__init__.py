"""One file for each family of models; `engine.models.model_registry` finds them."""
