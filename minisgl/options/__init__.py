"""From words on a command line to a `Config`, and the descriptions of all options."""
