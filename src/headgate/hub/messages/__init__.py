"""Messages, mailboxes, chat channels, and sessions with their signals."""
