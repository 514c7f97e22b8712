"""The built-in attention backends (group `attention`), one file each."""
