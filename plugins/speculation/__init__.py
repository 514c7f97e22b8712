"""The built-in proposers of draft tokens (group `speculation`), one file each."""
