"""Side room: the deterministic simulator."""
