"""A load generator and its figures."""
