"""Ranks of one leader: pools and transports in its own process or in others."""
