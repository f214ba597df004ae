"""Floor 1, pure: where KV lies, and which bytes move where."""
