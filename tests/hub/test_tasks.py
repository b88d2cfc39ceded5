"""Tasks, from HTTP to WebSocket and back."""

from typing import Any

from tests.support.agent_connections import empty_bucket
from tests.support.hub import ADMIN, AgentConnection, HubServer, hub_server
from tests.support.valkey import wait_for


def post_task(hub: HubServer, payload: object = None) -> str:
    with hub.http(ADMIN) as admin:
        answer = admin.post("/api/admin/tasks", json={"payload": payload})
    assert answer.status_code == 201
    task_id: str = answer.json()["task_id"]
    return task_id


def task_of(hub: HubServer, task_id: str) -> dict[str, Any]:
    with hub.http(ADMIN) as admin:
        tasks = {task["task_id"]: task for task in admin.get("/api/admin/tasks").json()["tasks"]}
    found: dict[str, Any] = tasks[task_id]
    return found


def hear_both(wire: AgentConnection) -> dict[str, dict[str, Any]]:
    """The next two frames by type, in whichever order they come: one answers, and the hub sends one by itself."""
    return {frame["type"]: frame for frame in (wire.hear(), wire.hear())}


def test_b5_a_task_is_posted_assigned_worked_on_and_completed() -> None:
    with hub_server() as hub, hub.agent("worker") as worker:
        token = hub.register("boss")
        with hub.http(token) as boss:
            answer = boss.post("/api/tasks", json={"payload": {"dig": 3}})
            assert (answer.status_code, answer.json()["state"]) == (201, "queued")
            task_id = answer.json()["task_id"]
            assigned = worker.hear()
            assert assigned == {"type": "task_assigned", "task_id": task_id, "attempt": 1, "payload": {"dig": 3}}
            assert worker.ask("task_accepted", task_id=task_id)["state"] == "accepted"
            assert worker.ask("task_progress", task_id=task_id, progress=0.25, note="dug")["state"] == "accepted"
            halfway = {"state": "accepted", "agent": "worker", "progress": 0.25, "note": "dug"}
            assert boss.get(f"/api/tasks/{task_id}").json().items() >= halfway.items()
            assert worker.ask("task_complete", task_id=task_id, result={"holes": 3})["state"] == "completed"
            done = {"state": "completed", "agent": "worker", "outcome": {"holes": 3}}
            assert boss.get(f"/api/tasks/{task_id}").json().items() >= done.items()
            assert [task["task_id"] for task in boss.get("/api/tasks?state=completed").json()["tasks"]] == [task_id]


def limit(hub: HubServer, agent: str, wire: AgentConnection) -> None:
    """Have an agent denied once."""
    empty_bucket(hub, agent)
    assert wire.ask("ping")["type"] == "rate_limited"


def test_b5_a_limited_agent_gets_no_task_until_its_quiet_period_ends_by_itself() -> None:
    with hub_server() as hub, hub.agent("worker") as worker:
        limit(hub, "worker", worker)
        task_id = post_task(hub)
        hub.clock.advance(59.999)
        assert worker.ask("status").items() >= {"status": "idle", "task_id": None, "rate_limited": True}.items()
        assert task_of(hub, task_id)["state"] == "queued"
        hub.clock.advance(0.001)
        assert worker.hear()["task_id"] == task_id, "though nothing else happened in the hub"


def test_b5_other_agents_get_the_tasks_of_a_limited_one() -> None:
    with hub_server() as hub, hub.agent("worker") as worker, hub.agent("other") as other:
        limit(hub, "worker", worker)
        one, two = post_task(hub), post_task(hub)
        assert other.hear()["task_id"] == one
        other.say("task_complete", task_id=one)
        heard = hear_both(other)
        assert (heard["task_updated"]["state"], heard["task_assigned"]["task_id"]) == ("completed", two)
        assert worker.ask("ping")["type"] == "rate_limited", "nothing else was said to it"


def test_b5_a_limited_agent_keeps_its_task() -> None:
    with hub_server() as hub, hub.agent("worker") as worker, hub.agent("other") as other:
        other.ask("status", status="busy")
        task_id = post_task(hub)
        assert worker.hear()["task_id"] == task_id
        assert worker.ask("task_accepted", task_id=task_id)["state"] == "accepted"
        limit(hub, "worker", worker)
        assert other.ask("status", status="idle")["status"] == "idle"
        assert worker.ask("task_progress", task_id=task_id, progress=0.5)["state"] == "accepted"
        assert task_of(hub, task_id).items() >= {"state": "accepted", "agent": "worker"}.items()
        assert worker.ask("task_complete", task_id=task_id)["state"] == "completed"
        assert other.ask("ping") == {"type": "pong"}, "it was never given to another"


def test_b5_the_task_of_an_agent_that_disconnects_is_assigned_again() -> None:
    with hub_server() as hub, hub.agent("other") as other:
        other.ask("status", status="busy")
        with hub.agent("worker") as worker:
            task_id = post_task(hub)
            assert worker.hear()["task_id"] == task_id
            assert worker.ask("task_accepted", task_id=task_id)["state"] == "accepted"
        wait_for(lambda: task_of(hub, task_id)["state"] == "queued", "the task to be queued again")
        other.say("status", status="idle")
        again = {"type": "task_assigned", "task_id": task_id, "attempt": 2, "payload": None}
        assert hear_both(other)["task_assigned"] == again
