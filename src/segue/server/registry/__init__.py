"""Floor 2: the registry. Who is there, at which address, in which incarnation."""
