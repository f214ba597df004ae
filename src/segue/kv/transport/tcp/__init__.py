"""Transport over TCP."""
