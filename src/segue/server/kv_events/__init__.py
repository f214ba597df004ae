"""KV events of an instance over ZMTP."""
