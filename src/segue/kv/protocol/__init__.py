"""The protocol of one hand-off. Events and time in, effects out. Pure."""
