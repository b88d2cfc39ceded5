"""What is allowed: limits, the decisions they make, and the clocks they read. Nothing here knows a store."""
