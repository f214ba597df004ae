"""Floor 2: moves bytes from registered memory into a peer's registered memory. Knows no protocol."""
