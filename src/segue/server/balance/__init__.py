"""Which replica gets a request. One small class per policy, one method each. Pure."""
