"""HTTP servers of segue on uvicorn."""
