"""Replay: what a policy would have done to the traffic in a log."""
