"""Settings of the commands: declarations, and the layers that they are read from."""
