"""WebSockets: agents at `/ws`, the relay at `/relay`, their frames, and flood control."""
