"""The HTTP server. OpenAI's API in, token ids to the fleet, text out."""
