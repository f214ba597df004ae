"""The hand-off of KV between two workers, as a library."""
