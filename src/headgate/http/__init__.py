"""What a decision is in HTTP: header fields and problem bodies."""
