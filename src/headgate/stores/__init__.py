"""Where limits are counted: the `Store` protocol, its implementations, and the suite that every store passes."""
