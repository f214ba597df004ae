"""The model with a paged KV pool. Importing this package imports no torch."""
