"""The relay's envelopes, generated from proto/headgate/v1/envelope.proto by `python proto/generate.py`."""
