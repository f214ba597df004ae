"""Other engines and clusters."""
