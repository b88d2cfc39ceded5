"""Replay: what a policy would have said to the traffic in a log."""
