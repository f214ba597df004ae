"""Floor 0, pure: the vocabulary every other room uses. Read `types.py` first."""
