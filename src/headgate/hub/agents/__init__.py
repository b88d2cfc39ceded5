"""Agents: registration, tokens and connections."""
