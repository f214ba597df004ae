"""Placement. Who is there (`membership`), who gets a request (`router`), and one request's life on
them (`call`); `Fleet` puts them together as the backend of a frontend."""
