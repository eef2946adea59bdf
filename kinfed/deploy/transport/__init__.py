"""Messages: what is in them, who may send them, how they are exchanged."""
