"""The hub: a server that agents connect to, with the gate in front of every request."""
