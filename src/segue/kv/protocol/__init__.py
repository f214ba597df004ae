"""Floor 1, pure: the protocol of one hand-off. Events and time in, effects out."""
