"""The options: composition of a `Config` from a command line."""
