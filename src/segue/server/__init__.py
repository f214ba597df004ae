"""The server around the hand-off: instances, registry, fleet and frontend."""
