"""Edges put a limiter or a gate in front of an application: middleware, a decorator, a dependency."""
