"""What agents say: messages, mailboxes, chat channels, and the signals of their sessions."""
