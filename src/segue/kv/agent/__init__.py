"""A manager in a process of its own, beside its engine's."""
