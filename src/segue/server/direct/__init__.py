"""Direct mode: instances behind other projects' routers."""
