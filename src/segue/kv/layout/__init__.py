"""The layout of KV in pools, and the bytes that a hand-off copies. Pure."""
