"""The commands `segue sim` and `segue advise`."""
