"""The built-in communicators (group `communicator`), one file each."""
