"""The start and end of an ASGI application: its store is verified, and closed."""

import logging

from headgate.edges.application import SCOPE_KEY, Application, RequestLimits
from headgate.edges.requests import App, Message, Receive, Scope, Send
from headgate.errors import InvalidInput, StoreAway, StoreError
from headgate.stores.base import Store
from headgate.stores.urls import aclose_store, averify_store

_log = logging.getLogger("headgate")


async def run_lifespan(
    app: App, application: Application, opened: Store | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the lifespan of an application. `opened` is its store, if that is to be closed with it.

    The application doesn't start with a store that can't be used, or with two stores. One that is away may come back.
    """
    startup: Message | None = await receive()
    outer: RequestLimits | None = scope.get(SCOPE_KEY)
    try:
        if outer is None:
            scope[SCOPE_KEY] = RequestLimits(application, sends=True)
        else:
            outer.application = application.inside(outer.application)
        if opened is not None:
            await averify_store(opened)
    except StoreAway as away:
        _log.error("RateLimitMiddleware store: starting without the server: %s", away)
    except (InvalidInput, StoreError) as error:
        if opened is not None:
            await aclose_store(opened)
        await send({"type": "lifespan.startup.failed", "message": f"RateLimitMiddleware store: {error}"})
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
