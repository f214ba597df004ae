"""Base of the transports that call another project's library."""
