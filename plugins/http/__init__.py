"""The extensions of the API server, one file each: `minisgl.server.extension` says what they may do and loads them."""
