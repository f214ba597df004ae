"""Transports through a staging pool in host memory, for memory that no transport takes."""
