"""The built-in graph runners (group `graph`), one file each."""
