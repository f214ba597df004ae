"""Floor 1, pure: which replica gets a request. One small class per policy, one method each."""
