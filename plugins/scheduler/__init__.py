"""The built-in scheduling policies (group `scheduler`), one file each."""
