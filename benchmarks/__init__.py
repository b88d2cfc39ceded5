"""headgate measured beside other rate limiters: `python benchmarks/run.py`."""
