"""WebSockets: agents at `/ws`, envelopes at `/relay`, and the frames between them."""
