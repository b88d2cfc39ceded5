"""The hub as a program: listening, signals and shutdown."""

import asyncio
import resource
import signal
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

import structlog
import uvicorn
import uvloop

from headgate._version import VERSION
from headgate.errors import HeadgateError
from headgate.gate.reload import PolicyWatcher
from headgate.hub.api.http import HEALTH
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Access
from headgate.hub.app import Hub
from headgate.hub.config_file import ConfigFile
from headgate.hub.connections.guard import HTTP_PER_ADDRESS, RESERVE, Asgi, ConnectionGuard
from headgate.hub.settings import HubSettings

_BACKLOG: Final = 2048
_OTHER_FILES: Final = 200  # open files beside the connections: databases, the store's, webhooks
_OVERSIZE: Final = 4  # times the largest frame is still answered; a larger one closes the connection

_log = structlog.get_logger("headgate.hub")


class Server(uvicorn.Server):
    """uvicorn's server, which drains the hub before it closes, and does not raise the signal again afterwards."""

    def __init__(self, hub: Hub, guard: ConnectionGuard, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._hub, self._guard = hub, guard

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        _log.info("stopping")
        for server in self.servers:
            server.close()  # no new connections
        await self._hub.drain()
        self._guard.stopping = True
        await super().shutdown(sockets)
        self._guard.abort_all()


def serve(settings: HubSettings, config: Path | None, out: TextIO, given: Mapping[str, str] | None = None) -> None:
    """Run a hub until SIGINT or SIGTERM. `given` are the settings that the configuration file doesn't decide."""
    file = ConfigFile(config, given)
    tls = tls_context(settings)  # an unusable certificate is refused before anything is started
    settings = _within_file_limit(settings)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by default it kills, also while starting
    try:
        with _listen(settings) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, file, listener, tls, out))
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)


async def _serve(
    settings: HubSettings,
    file: ConfigFile,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    out: TextIO,
) -> None:
    async with Hub(settings, file.policy, config=file) as hub:
        server = Server(hub, *server_config(hub, settings, tls))
        watcher = None if file.path is None else PolicyWatcher(hub.gate, file.path, sighup=True, read=file.read)
        with _ignore_sighup() if watcher is None else watcher:
            await _print_welcome(hub, settings, listener, out)
            await server.serve([listener])
    _log.info("stopped")


@contextmanager
def _ignore_sighup() -> Iterator[None]:
    """Log a SIGHUP to a hub that has no policy file, which would end it otherwise."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, _log.warning, "SIGHUP ignored: without --config there is nothing to reload")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the process ends


def server_config(
    app: Asgi, settings: HubSettings, tls: ssl.SSLContext | None
) -> tuple[ConnectionGuard, uvicorn.Config]:
    """The guard of a hub's connections, and the configuration of uvicorn, whose application is the guard."""
    guard = ConnectionGuard(
        app,
        most=settings.max_connections + settings.max_http_connections,
        most_per_address=settings.max_connections_per_address + HTTP_PER_ADDRESS,
        max_body=settings.max_frame,
        trusted=settings.trusted_proxies,
        probes=[route.path for route in ROUTES if route.access is Access.PROBE and route.action == HEALTH],
        tls=tls,
    )
    config = uvicorn.Config(
        guard,
        ws="websockets-sansio",
        ws_max_size=settings.max_frame * _OVERSIZE,
        ws_per_message_deflate=False,  # it costs memory per connection, and small frames could inflate
        ws_ping_interval=None,  # the guard pings
        http=guard.protocol,  # type: ignore[arg-type]  # a function is as good as a class
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_graceful_shutdown=max(round(settings.shutdown_within), 1),
        backlog=_BACKLOG,
    )
    return guard, config


def tls_context(settings: HubSettings) -> ssl.SSLContext | None:
    """The context of a server with TLS; None without a certificate."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None:
        if key is not None:
            raise HeadgateError("--tls-key: expected --tls-certificate too")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        files = str(certificate) if key is None else f"{certificate} and {key}"
        raise HeadgateError(f"{files}: expected a certificate and its key in PEM, got: {error.strerror}") from error
    return context


def _within_file_limit(settings: HubSettings) -> HubSettings:
    """Raise the limit on open files to what the connections need; settings with fewer connections if it can't be."""
    asked = settings.max_connections + settings.max_http_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = asked + RESERVE + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return settings
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):  # a container, or macOS with its own maximum
        allowed = soft
    if allowed == needed:
        return settings
    most = max(allowed - RESERVE - _OTHER_FILES, 2)
    http = max(most * settings.max_http_connections // asked, 1)
    reduced = replace(settings, max_connections=most - http, max_http_connections=http)
    _log.warning(
        "fewer connections than set: the limit on open files is too low; raise it to the number needed (ulimit -n, "
        "or LimitNOFILE= of systemd)",
        open_files=allowed,
        needed=needed,
        max_connections=reduced.max_connections,
        max_http_connections=reduced.max_http_connections,
    )
    return reduced


def _listen(settings: HubSettings) -> socket.socket:
    """A listening socket, opened before anything is started."""
    try:
        kind, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(kind, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise HeadgateError(
            f"{settings.host} port {settings.port}: expected an address to listen on, got: {error.strerror}; "
            "choose another with --host or --port"
        ) from error
    return listener


def _dashboard(hub: Hub, where: str) -> str:
    """The link to the dashboard. The fragment stays in the browser: no proxy or log sees it."""
    return f"{where}/dashboard" + (f"#token={hub.tokens.link}" if hub.tokens.link else "")


async def _print_welcome(hub: Hub, settings: HubSettings, listener: socket.socket, out: TextIO) -> None:
    """Print the hub's address, and the admin's token if it was created at this start."""
    host, port = listener.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    secure = "s" if settings.tls_certificate else ""
    lines = [f"headgate {VERSION} listens on http{secure}://{where} (agents: ws{secure}://{where}/ws)"]
    if hub.tokens.created:
        lines.append(f"admin token, shown this once: {hub.tokens.created}")
    lines.append(f"dashboard: {_dashboard(hub, f'http{secure}://{where}')}")
    print("\n".join(lines), file=out, flush=True)
    _log.info("started", address=where, store=_shown(hub.settings.store))


def _shown(url: str) -> str:
    """A store's URL without credentials and options."""
    return url.rpartition("@")[2].partition("?")[0] or "memory"
