"""Moves bytes from registered memory into a peer's registered memory. Knows no protocol."""
