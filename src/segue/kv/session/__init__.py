"""Floor 2: the control channel between two leaders, or a frontend and a leader."""
