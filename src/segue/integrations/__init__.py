"""Side room: other engines and clusters."""
