"""Other APIs as chats: for the extensions `minisgl.plugins.http.responses` and `minisgl.plugins.http.messages`."""
