"""Tasks: the queue, and the scheduler that assigns them to idle agents."""
