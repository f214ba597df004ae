"""segue: prefill and decode on separate workers, and a KV hand-off that can be trusted."""

__version__ = "0.2.0"
