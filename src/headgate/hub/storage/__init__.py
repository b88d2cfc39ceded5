"""What a hub remembers, in SQLite."""
