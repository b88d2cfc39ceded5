"""The start and end of an ASGI application: its store is verified, and closed."""

import logging

from headgate.edges.application import SCOPE_KEY, ApplicationSettings, join_limits
from headgate.edges.requests import App, Message, Receive, Scope, Send
from headgate.errors import StoreAway, StoreError
from headgate.stores.base import Store
from headgate.stores.urls import aclose_store, averify_store

_log = logging.getLogger("headgate")


async def run_lifespan(
    app: App, settings: ApplicationSettings, opened: Store | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the lifespan of an application. `opened` is its store, if that is to be closed with it.

    The application doesn't start with a store that can't be used, or with two stores. One that is away may come back.
    """
    startup: Message | None = await receive()
    failure = ""
    outer = scope[SCOPE_KEY].settings.store if SCOPE_KEY in scope else None
    join_limits(scope, settings)
    if outer not in (None, settings.store):
        failure = "expected one store for an application, got two; pass the same object to all middleware"
    elif opened is not None:
        try:
            await averify_store(opened)
        except StoreAway as away:
            _log.error("RateLimitMiddleware store: starting without the server: %s", away)
        except StoreError as error:
            failure = str(error)
    if failure:
        if opened is not None:
            await aclose_store(opened)
        await send({"type": "lifespan.startup.failed", "message": f"RateLimitMiddleware store: {failure}"})
        return

    async def receive_again() -> Message:
        nonlocal startup
        if startup is None:
            return await receive()
        message, startup = startup, None
        return message

    try:
        await app(scope, receive_again, send)
    finally:
        if opened is not None:
            await aclose_store(opened)
