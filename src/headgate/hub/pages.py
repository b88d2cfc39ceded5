"""The dashboard's page and what belongs to it: a few files, served as they are."""

from importlib.resources import files
from typing import Final

from headgate.hub.http import Answer
from headgate.hub.routing import Call, Handler, Route, Who

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = ((b"content-security-policy", _POLICY.encode()), (b"referrer-policy", b"no-referrer"))


def _file(name: str, media: str) -> Handler:
    """A handler that gives a file."""
    answer = Answer(200, files("headgate.hub").joinpath("static", name).read_bytes(), _HEADERS, media)

    async def handler(_call: Call) -> Answer:
        return answer

    return handler


async def _to_dashboard(_call: Call) -> Answer:
    return Answer(307, b"", [(b"location", b"dashboard")], "text/plain")


def _route(path: str, name: str, media: str, about: str) -> Route:
    return Route("GET", path, "get_dashboard", Who.PROBE, _file(name, media), str, about, media=media)


ROUTES: Final = (
    Route(
        "GET", "/", "get_dashboard", Who.PROBE, _to_dashboard, str, "leads to the dashboard", status=307,
        media="text/plain",
    ),
    _route("/dashboard", "dashboard.html", "text/html; charset=utf-8", "the dashboard: a page"),
    _route("/dashboard/dashboard.js", "dashboard.js", "text/javascript; charset=utf-8", "the page's script"),
    _route("/dashboard/dashboard.css", "dashboard.css", "text/css; charset=utf-8", "the page's style"),
    _route("/dashboard/icon.svg", "icon.svg", "image/svg+xml", "the page's icon"),
)  # fmt: skip
