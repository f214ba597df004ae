"""One process of an instance: the leader's loop, its sessions, its rank workers, its roles."""
