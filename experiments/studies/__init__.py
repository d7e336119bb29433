"""Studies of our own: what the library's choices rest on."""
