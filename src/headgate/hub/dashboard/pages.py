"""The dashboard's page and what belongs to it: a few files, served as they are."""

from importlib.resources import files
from typing import Final

from headgate.hub.api.http import Answer
from headgate.hub.api.routing import Call, Handler, Route, Who

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS: Final = ((b"content-security-policy", _POLICY.encode()), (b"referrer-policy", b"no-referrer"))
_MEDIA: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


def _file(name: str) -> tuple[Handler, str]:
    """A handler that gives a file, and what kind of file it is."""
    media = _MEDIA[name.rpartition(".")[2]]
    answer = Answer(200, files("headgate.hub.dashboard").joinpath("static", name).read_bytes(), _HEADERS, media)

    async def handler(_call: Call) -> Answer:
        return answer

    return handler, media


def _to_dashboard(path: str, where: bytes, about: str) -> Route:
    """A route that leads to the page, so that what it names relative to itself is found behind any prefix."""

    async def handler(_call: Call) -> Answer:
        return Answer(307, b"", [(b"location", where)], "text/plain")

    return Route("GET", path, "get_dashboard", Who.PROBE, handler, str, about, status=307, media="text/plain")


def _route(path: str, name: str, about: str) -> Route:
    handler, media = _file(name)
    return Route("GET", path, "get_dashboard", Who.PROBE, handler, str, about, media=media)


ROUTES: Final = (
    _to_dashboard("/", b"dashboard", "leads to the dashboard"),
    _to_dashboard("/dashboard/", b"../dashboard", "leads to the dashboard, which has no slash at its end"),
    _route("/dashboard", "dashboard.html", "the dashboard: a page"),
    _route("/dashboard/dashboard.css", "dashboard.css", "the page's style"),
    _route("/dashboard/icon.svg", "icon.svg", "the page's icon"),
    *(
        _route(f"/dashboard/{name}.js", f"{name}.js", f"the page's script: {about}")
        for name, about in {
            "dashboard": "all of it, put together",
            "live": "the socket",
            "cards": "the agents",
            "charts": "what is drawn",
            "alerts": "alerts and notices",
            "changes": "what the admin can do",
            "dom": "the page's nodes",
            "keeping": "what the browser keeps",
        }.items()
    ),
)
