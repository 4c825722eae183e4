"""An execution is moved to other code from the console, and a page tells which code lives."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from loom_django import FlowContext, definitions, flow
from loom_django.models import Execution
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import client_of, kinds, make_user, url
from tests.admin.test_lists import LOGGED_IN, statements

pytestmark = pytest.mark.django_db(transaction=True)

MOVE = {"target": "ask@3", "strategy": "replay-check", "question": "", "payload": "", "reason": "release 3"}


def _without_label(ctx: FlowContext, text: str = "", rounds: int = 1) -> None:
    """Version 2 of ask, which declares no steps."""


@pytest.fixture(autouse=True)
def versions() -> Iterator[None]:
    """Version 2 lacks a step, version 3 has it and ends after the first answer."""

    def again(ctx: FlowContext, text: str = "", rounds: int = 1) -> str:
        ctx.run(flows.label, text)
        return f"by 3: {ctx.suspend('Approval')}"

    flow("ask", version=2)(_without_label)
    flow("ask", version=3, steps=[flows.label])(again)
    yield
    definitions.registry.forget("ask")
    definitions.registry.register(flows.ask)


def text_of(response: object) -> str:
    content: bytes = response.content  # type: ignore[attr-defined]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", content.decode())).replace("&#x27;", "'")


def parked(rounds: int = 1) -> dict[str, object]:
    flows.ask.using(execution_id="x").start(rounds=rounds)
    return {**MOVE, "park": loom.parked_at_sequence("x")}


def test_the_form_shows_the_replay_check_of_each_version(console):
    """Before anything is chosen: what each version has no place for, and what it declares differently."""
    parked()
    text = text_of(console.get(url("execution_move", "x")))
    assert "ask@2 1 step 'label' (1 recorded step) is not declared" in text
    assert "ask@3 1 passed" in text
    assert "It was recorded with ask@1" in text


def test_a_move_without_an_answer_leaves_it_parked(console):
    """MIGRATED is the only event; the row tells the new version."""
    given = parked()
    preview = text_of(console.post(url("execution_move", "x"), {**given, "stage": "preview"}))
    assert "EXECUTION_MIGRATED" in preview
    assert "EXECUTION_RESUMED" not in preview
    assert console.post(url("execution_move", "x"), {**given, "stage": "confirm"}).status_code == 302
    assert kinds("x")[-2:] == ["EXECUTION_SUSPENDED", "EXECUTION_MIGRATED"]
    assert Execution.objects.get(pk="x").version == 3


def test_a_move_with_an_answer_goes_on_in_the_new_code(console):
    """One append, with the person and the reason."""
    given = {**parked(), "question": "wait:Approval#1", "payload": "7", "stage": "confirm"}
    assert console.post(url("execution_move", "x"), given).status_code == 302
    assert loom.state("x").result == "by 3: 7"
    [moved] = loom.history("x", kinds=["EXECUTION_MIGRATED"])
    assert (moved.data["principal"], moved.data["reason"]) == ("anna", "release 3")


def test_what_does_not_pass_is_refused_unless_somebody_vouches_for_it(console):
    """On an ordinary page, with what is missing; nothing is appended."""
    given = {**parked(), "target": "ask@2", "stage": "confirm"}
    before = kinds("x")
    refused = console.post(url("execution_move", "x"), given)
    assert refused.status_code == 409
    assert "step 'label' (1 recorded step) is not declared" in text_of(refused)
    assert kinds("x") == before
    vouched = {**given, "strategy": "operator-ack"}
    assert console.post(url("execution_move", "x"), vouched).status_code == 302
    assert Execution.objects.get(pk="x").version == 2


def test_a_stale_form_and_a_slip_append_nothing(console):
    """A park that is over is refused; a payload without an answer is told at its field."""
    given = {**parked(rounds=2), "stage": "confirm"}
    slip = console.post(url("execution_move", "x"), {**given, "payload": "7"})
    assert "A payload goes with an answer only." in text_of(slip)
    unknown = console.post(url("execution_move", "x"), {**given, "target": "nobody@1"})
    assert unknown.status_code == 200
    loom.resume("x", event_type="Approval")
    before = kinds("x")
    stale = console.post(url("execution_move", "x"), given)
    assert stale.status_code == 409
    assert f"not at {given['park']}" in text_of(stale)
    assert kinds("x") == before


def test_the_page_of_an_execution_says_why_nobody_goes_on_with_it(console):
    """With what changed and the ways out, for as long as it has not ended."""
    parked()
    assert "Pin:" not in text_of(console.get(url("execution_change", "x")))
    definitions.registry.forget("ask")
    flow("ask", version=4)(_without_label)
    text = text_of(console.get(url("execution_change", "x")))
    assert "step 'label' is gone" in text
    assert "Pin:" in text
    loom.cancel("x")
    assert "Pin:" not in text_of(console.get(url("execution_change", "x")))


def test_the_versions_page_tells_what_drifted(console):
    """Each group with how many live, what goes on with it, and the list of them."""
    for number in range(2):
        flows.ask.using(execution_id=f"kept-{number}").start()
    flows.nap.using(execution_id="gone").start()
    loom.cancel("kept-0")
    page = text_of(console.get(url("versions")))
    assert re.search(r"ask@1 sha256:\w{12} 1 .{5,40} version 1 ", page)
    assert "All of them go on." in page
    definitions.registry.forget("nap")
    try:
        response = console.get(url("versions"))
    finally:
        definitions.registry.register(flows.nap)
    assert "1 live execution is left alone by this code." in text_of(response)
    assert "nothing: no flow of that id here" in text_of(response)
    [address] = re.findall(r'href="([^"]*flow_id__exact=nap[^"]*)"', response.content.decode())
    listed = console.get(address.replace("&amp;", "&")).content.decode()
    assert "gone" in listed
    assert "kept-1" not in listed


def test_the_versions_page_asks_once(console):
    """One aggregate, however many there are; and only of whom may look."""
    flows.ask.start()
    assert len(statements(console, url("versions"))) == LOGGED_IN + 1
    assert client_of(make_user("nobody")).get(url("versions")).status_code == 403
    assert console.post(url("versions")).status_code == 405
