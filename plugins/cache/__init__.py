"""The built-in prefix caches (group `cache`), one file each."""
