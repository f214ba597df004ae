"""What prefill and decode do with a request, queue by queue. Pure."""
