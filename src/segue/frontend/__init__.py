"""Floor 5: the HTTP door. OpenAI's API in, token ids to the fleet, text out."""
