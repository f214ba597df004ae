"""Transport over shared memory of one host."""
