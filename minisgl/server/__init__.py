"""The HTTP server: the API server, the worker processes behind it, and the launcher that watches the workers."""
