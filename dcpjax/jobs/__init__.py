"""A file of requests in, a file of results out: every finished line is on disk at once."""
