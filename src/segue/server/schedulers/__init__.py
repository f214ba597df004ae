"""The handling of a request by prefill and decode, queue by queue. Pure."""
