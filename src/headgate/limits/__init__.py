"""Limits, their decisions, and clocks. Nothing here knows a store."""
