"""Routes of the dashboard: its state, alerts and addresses, its page, and the page's files, served as they are."""

from importlib.resources import files
from typing import Annotated, Final

from msgspec import Meta, Struct

from headgate.hub.api.http import DASHBOARD_STATE
from headgate.hub.api.responses import ApiResponse
from headgate.hub.api.routing import Access, Body, Call, Route
from headgate.hub.dashboard.cards import Cards, DashboardState, sees_accounts
from headgate.hub.dashboard.updates import MAX_CARDS
from headgate.hub.monitoring.account_alerts import AccountAlert, AccountAlerts
from headgate.hub.monitoring.address_log import AddressLog, DeniedAddress
from headgate.hub.monitoring.alerts import Alert, Alerts
from headgate.stores.base import MAX_ALERTS

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


class DashboardQuery(Body):
    limit: Annotated[int, Meta(ge=1, le=MAX_CARDS)] = 500


class AlertsQuery(Body):
    limit: Annotated[int, Meta(ge=1, le=MAX_ALERTS)] = 100
    open: bool = False
    """Only open ones."""


class AlertList(Struct):
    alerts: list[Alert]
    """Of agents, newest first: all that are open, and the last resolved ones."""
    account_alerts: list[AccountAlert]
    """Of accounts, likewise. Only admins see accounts."""
    open: int
    """The number of open ones, of agents and accounts."""


class DeniedAddresses(Struct):
    addresses: list[DeniedAddress]


async def _state(call: Call, cards: Cards) -> DashboardState:
    return await cards.state(call.query.limit, role=call.caller.role)


async def _alerts(call: Call, alerts: Alerts, account_alerts: AccountAlerts) -> AlertList:
    found = [alert for alert in alerts.known() if alert.resolved_at is None or not call.query.open]
    limit = call.query.limit
    if not sees_accounts(call.caller.role):
        return AlertList(found[:limit], [], alerts.open)
    accounts = [alert for alert in account_alerts.known() if alert.resolved_at is None or not call.query.open]
    return AlertList(found[:limit], accounts[:limit], alerts.open + account_alerts.open)


async def _addresses(_call: Call, address_log: AddressLog) -> DeniedAddresses:
    return DeniedAddresses(address_log.denied())


def _file(path: str, name: str, about: str) -> Route:
    """The route of a static file."""
    media = _MEDIA[name.rpartition(".")[2]]
    response = ApiResponse(200, files("headgate.hub.dashboard").joinpath("static", name).read_bytes(), _HEADERS, media)

    async def handler(_call: Call) -> ApiResponse:
        return response

    return Route("GET", path, "get_dashboard", Access.PROBE, handler, about, media=media)


def _redirect(path: str, where: bytes, about: str) -> Route:
    """A redirect to the page, relative, so that it works behind any path prefix."""

    async def handler(_call: Call) -> ApiResponse:
        return ApiResponse(307, b"", [(b"location", where)], "text/plain")

    return Route("GET", path, "get_dashboard", Access.PROBE, handler, about, status=307, media="text/plain")


ROUTES: Final = (
    Route(
        "GET", "/api/dashboard/state", DASHBOARD_STATE, Access.VIEWER, _state,
        "the state that a dashboard shows", query=DashboardQuery,
    ),
    Route(
        "GET", "/api/admin/alerts", "admin", Access.VIEWER, _alerts,
        "all open alerts and the last resolved ones, newest first", query=AlertsQuery,
    ),
    Route(
        "GET", "/api/admin/addresses", "admin", Access.VIEWER, _addresses,
        "addresses that were denied in the last hour, most denials first",
    ),
    _redirect("/", b"dashboard", "redirects to the dashboard"),
    _redirect("/dashboard/", b"../dashboard", "redirects to the dashboard, without the slash"),
    _file("/dashboard", "dashboard.html", "the dashboard: a page"),
    _file("/dashboard/dashboard.css", "dashboard.css", "the page's style sheet"),
    _file("/dashboard/icon.svg", "icon.svg", "the page's icon"),
    *(
        _file(f"/dashboard/{name}.js", f"{name}.js", f"the page's script: {about}")
        for name, about in {
            "dashboard": "the whole page",
            "view": "what the user has chosen to see",
            "live": "the socket",
            "api": "requests to the hub",
            "agents": "the agents' data",
            "orders": "filters and orders of agents",
            "list": "the list of agents",
            "table": "the agents as a table",
            "cards": "the agents as cards",
            "state": "the state of an agent",
            "agent_page": "the page of an agent",
            "changes": "the admin's changes",
            "summary": "the summary",
            "alerts": "alerts",
            "accounts": "the accounts",
            "account_changes": "the admin's changes to accounts",
            "budget": "the limits of accounts",
            "toasts": "notices",
            "timeline": "the traffic of all agents",
            "charts": "the traffic of one agent",
            "tip": "the values of charts",
            "theme": "light and dark",
            "dom": "the page's nodes",
            "storage": "the browser's storage",
        }.items()
    ),
)  # fmt: skip
