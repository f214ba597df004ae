"""Side room: metrics, timelines."""
