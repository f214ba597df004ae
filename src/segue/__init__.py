"""segue: prefill and decode on separate workers, and a KV hand-off that can be trusted."""

__version__ = "0.1.0"
