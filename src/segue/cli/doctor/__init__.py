"""`segue doctor`: facts of a host and of a deployment, and what is wrong with them."""
