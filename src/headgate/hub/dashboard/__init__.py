"""The dashboard: its cards, its live feed and its static files."""
