"""Memory that transports read and write: pools, ranges, copies."""
