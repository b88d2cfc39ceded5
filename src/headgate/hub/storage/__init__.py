"""The hub's SQLite database."""
