"""The dashboard warns of a store without its data."""

from playwright.sync_api import expect

from headgate import RedisStore
from tests.support.browser import Visitors
from tests.support.hub import VIEWER, hub_server
from tests.support.valkey import PATIENCE, ValkeyServer


def test_the_dashboard_warns_while_the_store_is_lost(visitors: Visitors) -> None:
    with (
        ValkeyServer() as server,
        RedisStore(server.url, timeout=PATIENCE) as store,
        hub_server(store=store) as hub,
        server.client() as client,
    ):
        page = visitors.come(hub, VIEWER)
        expect(page.locator("#store")).to_have_text("connected")
        expect(page.locator("#problems")).to_be_hidden()
        saved = {key: client.dump(key) for key in client.keys("*admin*")}
        client.flushall()
        expect(page.locator("#store")).to_have_text("lost")
        expect(page.get_by_role("alert").filter(has_text="lost its data")).to_contain_text(
            "nobody can register or hold, and limits can't be changed"
        )
        for key, value in saved.items():
            client.restore(key, 0, value)
        expect(page.locator("#store")).to_have_text("connected")
        expect(page.locator("#problems")).to_be_hidden()
