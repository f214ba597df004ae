"""Placement: the replicas (`membership`), the choice for a request (`router`), and one request's life on them
(`call`). `Fleet` is a frontend's backend made of them."""
