"""Tasks of agents whose accounts are empty: an empty budget of a team keeps no task from anybody."""

from headgate import Policy
from tests.support.account_alerts import PAYS, spend
from tests.support.hub import ADMIN, hub_server


def test_f1_agents_of_an_empty_account_still_get_tasks() -> None:
    with (
        hub_server(PAYS) as hub,
        hub.agent("planner") as planner,
        hub.agent("writer") as writer,
        hub.http(ADMIN) as http,
    ):
        assert spend(hub, "10")
        assert not any([spend(hub, "1", agent) for agent in ("planner", "writer") * 10])
        for number in range(2):
            http.post("/api/admin/tasks", json={"payload": number}).raise_for_status()
        assert sorted([planner.hear()["payload"], writer.hear()["payload"]]) == [0, 1]


def test_f1_an_agent_over_a_limit_of_its_own_gets_none_until_it_is_quiet() -> None:
    policy = Policy(
        accounts={"at": {"acme/planner": {"usd": "10 in all"}}, "levels": ["org", "agent", "session"]},
        agents={"planner": {"account": "acme"}, "writer": {"account": "acme"}},
    )
    with (
        hub_server(policy) as hub,
        hub.agent("planner") as planner,
        hub.agent("writer") as writer,
        hub.http(ADMIN) as http,
    ):
        assert not spend(hub, "11")
        for number in range(2):
            http.post("/api/admin/tasks", json={"payload": number}).raise_for_status()
        first = writer.hear()
        assert first["payload"] == 0
        hub.clock.advance(60)
        assert planner.hear()["payload"] == 1
