"""Awkward names of agents."""

HOSTILE = "<img src=x onerror=alert(1)>"
BACKWARDS = "מתכנן"
LONG = "n" * 128
AWKWARD = "a/b?c#d%2e &'\""
