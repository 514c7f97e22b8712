"""A student's own engine: the server with all finished lab files, its drawing, its counts and its result card."""
