"""Floor 5: processes: leader loop, rank workers, supervisor."""
