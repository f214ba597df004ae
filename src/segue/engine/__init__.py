"""Floor 3: the model with a paged KV pool. Importing this package imports no torch."""
