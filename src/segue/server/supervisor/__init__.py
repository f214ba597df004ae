"""`segue serve`: starts processes, watches them and starts them again."""
