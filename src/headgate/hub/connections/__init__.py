"""The layer between sockets and uvicorn's protocols: fair shares, bounds and timeouts for every connection.

uvicorn reads and parses what comes at once, and has no bounds on the time that a peer takes, on control frames, or on
connections by address. Its protocols are used as they are. A `GuardedConnection` is the protocol of the socket's
transport, and the transport of uvicorn's protocol: it passes bytes on in slices, one in each turn of the event loop,
and only while uvicorn reads and the peer does. `ConnectionGuard` has the connections of one server. It makes their
protocols (`uvicorn.Config(http=...)`), and is the ASGI application around the hub, which tells a connection of its
requests.

Of uvicorn this uses, beyond what it documents: the arguments of a protocol class, `HttpToolsProtocol` by its module,
`app_state`, whose content is found in `scope["state"]`, `set_protocol` of the transport at an upgrade, and the texts of
three log messages. Before raising the bound on its version in pyproject.toml, run tests/hub/test_connection*.py,
test_slices.py, test_flood.py and test_fuzz.py.
"""
