"""The dashboard: its pages, its cards and its live feed."""
