"""Models: where they come from, which families run, how they are loaded."""
