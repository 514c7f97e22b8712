"""The API server, the processes behind it, and who watches them."""
