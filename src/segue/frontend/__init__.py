"""Floor 5: the HTTP door."""
