"""Who is an agent: registration, tokens, and who is connected."""
