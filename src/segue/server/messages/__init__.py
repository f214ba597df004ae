"""Messages between frontends, instances and operators."""
