"""Numbers in JSON that readers can't parse: refused before they are stored, so that whatever is stored can be read."""

import json
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.hub.errors import RequestError
from headgate.hub.json_bounds import MAX_DIGITS, TOO_LARGE, check_numbers, expose_underflow
from tests.support.hub import hub_server


def accepted(text: str) -> bool:
    try:
        check_numbers(text.encode())
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("around", ["{}", "[{}]", '{{"a": {}}}', "[0.5,{},1]", '["1e999", {}, "\\"1e999"]'])
@pytest.mark.parametrize("sign", ["", "-"])
def test_numbers_that_fit_are_accepted_and_others_are_not(around: str, sign: str) -> None:
    for number in ("0", "1e199", "1E+0199", "1e-999", "1.5e10", "9" * MAX_DIGITS, "9" * MAX_DIGITS + "e199"):
        assert isfinite(json.loads(sign + number))
        assert accepted(around.format(sign + number))
    for number in ("1e200", "1E+999", "1e0000400", "1e1000", "9" * (MAX_DIGITS + 1), "9" * 5000, "0." + "9" * 5000):
        assert not accepted(around.format(sign + number))


@given(st.text(alphabet='19eE+"\\', max_size=300))
def test_digits_in_strings_are_no_numbers(text: str) -> None:
    assert accepted(json.dumps([text, {text: "9" * 5000}]))


@pytest.mark.parametrize("where", range(0, 2 * MAX_DIGITS, 7))
def test_many_digits_are_found_wherever_they_are(where: int) -> None:
    assert not accepted(json.dumps("x" * where)[:-1] + '", ' + "9" * (MAX_DIGITS + 1))


@pytest.mark.parametrize(
    "number", ["1e-400", "-1E-400", "0." + "0" * 400 + "1", "2e-324", "0." + "0" * 250 + "1e-99", "12.5e-0009999"]
)
def test_a_number_that_a_double_would_round_to_0_is_exposed(number: str) -> None:
    assert not float(number)
    assert expose_underflow(f'{{"a": [{number},1], "b\\" {number}": "{number}"}}') == (
        f'{{"a": [1e999,1], "b\\" {number}": "{number}"}}'
    )


@pytest.mark.parametrize(
    "number", ["0", "-0.0", "0e-400", "0." + "0" * 400, "5e-324", "1e-300", "1" + "0" * 300, "1e99"]
)
def test_other_numbers_are_left_as_they_are(number: str) -> None:
    text = f'{{"a": {number}, "1e-400": "{number}"}}'
    assert expose_underflow(text) == text


def test_a_body_that_is_passed_on_keeps_a_number_that_a_double_would_round_to_0() -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (planner, http):
        assert http.post("/api/messages", content='{"to": "planner", "body": [1e-400]}').is_success
        heard = planner.socket.recv()
        assert "[1e-400]" in heard


@pytest.mark.parametrize("number", ["9" * 5000, "1e999"])
def test_nobody_makes_a_mailbox_or_a_chat_channel_unreadable(number: str) -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (planner, http):
        task = http.post("/api/tasks", json={"payload": 1}).json()["task_id"]
        assert planner.hear()["task_id"] == task
        routes = {"/api/messages": "body", "/api/channels/general/publish": "body", "/api/tasks": "payload"}
        for path, name in routes.items():
            to = '"to": "planner", ' if path == "/api/messages" else ""
            refused = http.post(path, content=f'{{{to}"{name}": [{number}]}}')
            assert (refused.status_code, refused.json()["detail"]) == (400, TOO_LARGE)
        frames = {"message": '"to": "planner", "body"', "channel_publish": '"channel": "general", "body"'}
        frames["task_complete"] = f'"task_id": "{task}", "result"'
        for kind, fields in frames.items():
            planner.socket.send(f'{{"type": "{kind}", {fields}: {number}}}')
            assert planner.hear() == {"type": "error", "error": "invalid", "detail": TOO_LARGE}
        assert hub.hub.messages.accepted == 0
        assert planner.ask("task_complete", task_id=task, result=1)["state"] == "completed"
