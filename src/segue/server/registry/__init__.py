"""The registry: the instances, their addresses and their incarnations."""
