"""The HTTP API: routes, authentication, request bodies and responses."""
