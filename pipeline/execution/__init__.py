"""Planning and running stages: in one process, several, or on a Ray cluster."""
