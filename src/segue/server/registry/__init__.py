"""The registry. Who is there, at which address, in which incarnation."""
