"""Where KV lies, and which bytes move where. Pure."""
