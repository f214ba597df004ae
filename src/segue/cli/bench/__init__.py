"""The load generator of `segue bench`, and its figures."""
