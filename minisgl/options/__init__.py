"""The options: composition of a `Config` from a command line, and the descriptions of all options."""
