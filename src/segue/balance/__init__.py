"""Floor 1, pure: placement policies."""
