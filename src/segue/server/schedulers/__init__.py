"""Floor 4, pure: what prefill and decode do with a request, queue by queue."""
