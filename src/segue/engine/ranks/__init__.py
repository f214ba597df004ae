"""A replica that runs as several ranks."""
