"""Names of agents in the hub's paths: each leads to its agent, or is refused before anything is sent."""

import json

import pytest

from headgate.cli import build_parser
from headgate.hub.agents.names import DOTS, RESERVED, check_path_name
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Router
from tests.support.cli import Command, StartHub, leaf_commands
from tests.support.hub import ADMIN
from tests.support.scripted_server import scripted_server

pytestmark = pytest.mark.once

BESIDE_ROUTES = {
    "override set": ["heavy=1/minute"],
    "override remove": [],
    "exempt add": [],
    "exempt remove": [],
    "violations reset": [],
    "register": [],
    "exempt set": ["b"],
    "signals write": ["{}"],
    "admins add --role admin": [],
}
"""The commands that take the name of an agent beside routes, or that of a new one, and their other arguments."""
EXISTING = {
    "agents": [],
    "block": [],
    "unblock": [],
    "disconnect": [],
    "rotate": [],
    "revoke": [],
    "admins remove": [],
    "role set": ["viewer"],
    "role remove": [],
    "accounts move": ["acme"],
    "holds cancel": ["x"],
}
"""The commands that take the name of whatever agent there is."""
DOTTED = [".", "..", "a/../defaults", "./a", "..\\defaults", "a%2F..%2Fdefaults", "%2e%2e"]
HIDDEN = [*DOTTED, "defaults", "whitelist", "defaults/", "/defaults", "//whitelist", "%64efaults"]
"""Names that are other paths, at the hub or behind a proxy that decodes paths and resolves their dots."""
ODD = ["a/b", "/", "a b", "100%", "%2F", "a?b=c&d#e", "a+b;c", "...", "Defaults", "ß漢", "--"]
"""Names that need an escape, or look like others."""


def test_the_reserved_names_are_those_of_the_route_table() -> None:
    assert Router(ROUTES).reserved("agent") == RESERVED, "a new route beside {agent}? reserve its name for clients"
    free = [route for route in ROUTES if route.path.startswith(("/api/admin/agents", "/api/admin/admins"))]
    assert Router(free).reserved("agent") == DOTS, "a new route beside {agent}? then its name isn't free for agents"


def test_every_command_that_takes_a_name_is_in_the_table() -> None:
    named = {
        command for command, actions in leaf_commands(build_parser()) if any(one.metavar == "AGENT" for one in actions)
    }
    assert {command.partition(" --")[0] for command in (*BESIDE_ROUTES, *EXISTING)} == named - {
        "check"
    }  # which has it in its body


@pytest.mark.parametrize("name", HIDDEN)
def test_a_name_that_is_another_path_is_refused_and_nothing_is_sent(headgate: Command, name: str) -> None:
    with scripted_server({}) as one:
        for command, arguments in (BESIDE_ROUTES | (EXISTING if name in DOTTED else {})).items():
            err = headgate(*command.split(), "--hub", f"http://{one}", "--", name, *arguments).expect_error(2)
            expected = "expected a name without the parts ., .., defaults, whitelist, which the hub uses in its paths"
            if command in EXISTING:
                expected = "expected a name without the parts . and .., which lead to another path"
            error = f"headgate {command.partition(' --')[0]}: error: argument AGENT: {expected}, got {name!a}"
            assert err.splitlines()[-1] == error
        assert one.asked == []


def test_nobody_changes_the_limits_of_all_by_a_name(running_hub: StartHub, headgate: Command) -> None:
    with running_hub() as hub:
        before = hub.hub.gate.effective
        assert headgate("override", "set", "defaults", "heavy=1/minute")[0] == 2
        assert hub.hub.gate.effective == before


@pytest.mark.parametrize("name", ["a/../defaults", "./a", "whitelist/a", "..\\a", "%64efaults"])
def test_such_a_name_cannot_be_registered(running_hub: StartHub, name: str) -> None:
    with running_hub() as hub, hub.http(ADMIN) as admin:
        answer = admin.post("/api/admin/agents", json={"agent_id": name})
        expected = "a name without the parts ., .., defaults, whitelist, which the hub uses in its paths"
        detail = f"agent: expected {expected}, got {name!a}"
        assert (answer.status_code, answer.json()) == (400, {"error": "bad_agent", "detail": detail})


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_reserved_name_cannot_be_registered_by_anybody(running_hub: StartHub, name: str) -> None:
    with running_hub() as hub, hub.http(ADMIN) as admin, hub.http("") as stranger:
        for client, path in ((admin, "/api/admin/agents"), (stranger, "/api/onboard/register")):
            answer = client.post(path, json={"agent_id": name})
            detail = f"agent: expected an id that the hub doesn't use itself, got {name!r}"
            assert (answer.status_code, answer.json()) == (400, {"error": "reserved", "detail": detail})


def test_every_other_name_leads_to_its_agent(running_hub: StartHub, headgate: Command) -> None:
    with running_hub() as hub:
        gate = hub.hub.gate
        for name in ODD:
            assert check_path_name(name) == name
            hub.register(name)

            def run(command: str, *more: str, name: str = name) -> None:
                _ = headgate(*command.split(), "--json", "--", name, *more).expect_output()

            run("override set", "heavy=1/minute")
            assert list(gate.effective.overrides) == [name]
            run("override remove")
            assert list(gate.effective.overrides) == []
            run("exempt add")
            assert gate.effective.exempt == {name}
            run("exempt remove")
            assert gate.effective.exempt == set()
            gate.check(name, "ws", "light", cost=1000)
            assert gate.standing(name).violations == 1
            run("violations reset")
            assert gate.standing(name).violations == 0


@pytest.mark.parametrize("name", sorted(set(HIDDEN) - set(DOTTED)))
def test_b8_whatever_agent_there_is_can_be_stopped(
    running_hub: StartHub, headgate: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with running_hub() as hub:
        gate, registry = hub.hub.gate, hub.hub.registry
        with monkeypatch.context() as before:
            before.setattr(registry, "_reserved", frozenset())
            before.setattr("headgate.hub.agents.registry.check_new_name", str)
            token = hub.register(name)

        def run(command: str, *more: str) -> str:
            return headgate(*command.split(), "--json", "--", name, *more).expect_output()

        with hub.agent(name, token):
            assert json.loads(run("agents"))["agent_id"] == name
            run("role set", "viewer")
            assert gate.role_of(name) == "viewer"
            run("role remove")
            run("block")
            assert list(gate.effective.blocks) == [name]
            run("unblock")
            assert list(gate.effective.blocks) == []
            assert json.loads(run("disconnect"))["connections"] == 1
        assert json.loads(run("rotate"))["agent_id"] == name
        assert json.loads(run("revoke"))["revoked"]
        hub.run(gate.aset_role(name, "viewer", by="me"))
        run("admins remove")
        assert gate.role_of(name) == ""


def test_an_agent_that_was_registered_before_its_name_was_reserved_still_works(
    running_hub: StartHub, headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub() as hub:
        with monkeypatch.context() as before:
            before.setattr(hub.hub.registry, "_reserved", frozenset())
            token = hub.register("defaults")
        with hub.agent("defaults", token) as wire:
            assert wire.ask("ping")["type"] == "pong"
            assert headgate("check", "defaults", "--tier", "heavy")[0] == 0
            assert "\ndefaults  yes " in headgate("agents", "--all")[1]
        hub.hub.gate.check("other", "ws", "light")
        assert "defaults" in headgate("agents", "--all").expect_output()
