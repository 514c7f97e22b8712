"""The grader of lab files: each gate runs in a child process, then gates run against the real server."""
