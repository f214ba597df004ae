"""Chooses the replica of a request. One small class per policy, one method each. Pure."""
