"""The hub: a server that agents connect to, with the gate at every entrance."""
