"""Payloads are for those who may see them, and only as the project's hook leaves them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loom_django import EffectInDoubt
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import client_of, in_doubt, make_user, question, url, verdict

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "4111111111111111"
places: list[str] = []


def hide(value: Any, place: str) -> Any:
    """A hook as a project would write it."""
    places.append(place)
    if isinstance(value, dict):
        return {key: hide(item, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide(item, place) for item in value]
    return value.replace(SECRET, "…1111") if isinstance(value, str) else value


def broken(value: Any, place: str) -> Any:
    raise RuntimeError("the hook is broken")


@pytest.fixture
def redact(settings):
    def by(hook: str) -> None:
        settings.LOOM = {"REDACT": f"tests.admin.test_redaction.{hook}"}

    return by


def everything() -> list[str]:
    """Pages on which a payload could stand."""
    return [
        url("in_doubt"),
        url("execution_changelist"),
        url("execution_change", "doubt"),
        url("execution_verdict", "doubt", step="transfer"),
        url("execution_change", "broken"),
        url("execution_change", "done"),
        url("execution_log", "doubt"),
        url("execution_log", "done"),
    ]


def prepare() -> None:
    flows.bank.append(EffectInDoubt(f"card {SECRET} timed out"))
    in_doubt("doubt", SECRET, {"card": SECRET})
    flows.broken.using(execution_id="broken").start(f"card {SECRET}")
    flows.bank.append(SECRET)
    flows.pay.using(execution_id="done").start(SECRET)


def test_without_the_permission_no_payload_is_shown(db):
    """Inputs, arguments, results and payloads of events say that they are hidden."""
    in_doubt("doubt", SECRET, {"card": SECRET})
    flows.bank.append(SECRET)
    flows.pay.using(execution_id="done", attributes={"card": SECRET}).start(SECRET)
    client = client_of(make_user("carl", "view_execution", "view_event", "resolve_step"))
    for address in everything():
        if "log" in address or "broken" in address:
            continue
        page = client.get(address).content.decode()
        assert SECRET not in page, address
    assert "hidden" in client.get(url("execution_change", "doubt")).content.decode()
    assert client.get(url("execution_log", "doubt")).status_code == 403


def test_a_traceback_is_a_payload(db):
    """Its lines hold what the code had in hand."""
    flows.broken.using(execution_id="x").start("boom")
    carl = client_of(make_user("carl", "view_execution"))
    dora = client_of(make_user("dora", "view_execution", "view_payload"))
    assert "Traceback (most recent call last)" not in carl.get(url("execution_change", "x")).content.decode()
    assert "Traceback (most recent call last)" in dora.get(url("execution_change", "x")).content.decode()


def test_the_log_is_for_those_who_may_see_events(db):
    """Without that permission the page has no log, and there is no download."""
    in_doubt("x")
    carl = client_of(make_user("carl", "view_execution", "view_payload"))
    assert "Event log" not in carl.get(url("execution_change", "x")).content.decode()
    assert carl.get(url("execution_log", "x")).status_code == 403


def test_the_hook_decides_what_is_seen(console, redact):
    """Values, error texts, causes and tracebacks go through it, on every page and in the download."""
    redact("hide")
    prepare()
    places.clear()
    for address in everything():
        page = console.get(address).content.decode()
        assert SECRET not in page, address
    assert "…1111" in console.get(url("execution_change", "done")).content.decode()
    assert {
        "input",
        "result",
        "error",
        "cause",
        "traceback",
        "step:transfer:args",
        "step:transfer:output",
    } <= {*places}
    assert any(place.startswith("event:") for place in places)
    assert loom.handle("done").result() == SECRET  # the log itself is as it was


def test_a_broken_hook_hides(console, redact):
    """Nothing is shown because something failed."""
    redact("broken")
    prepare()
    for address in everything():
        answer = console.get(address)
        assert answer.status_code == 200
        assert SECRET not in answer.content.decode(), address
    assert "the redaction hook failed" in console.get(url("execution_change", "done")).content.decode()


def test_without_a_hook_the_download_is_the_log(console):
    """One object a line, payloads in the form in which they are recorded."""
    prepare()
    answer = console.get(url("execution_log", "done"))
    assert answer["Content-Disposition"] == 'attachment; filename="done.jsonl"'
    lines = [json.loads(line) for line in answer.content.decode().splitlines()]
    assert [line["payload"] for line in lines] == [event.data for event in loom.history("done")]


def test_what_is_not_registered_here_is_shown_as_recorded(console, monkeypatch):
    """A class that is gone breaks no page."""
    from loom_django.kernel import codec

    flows.receipts.using(execution_id="x").start("receipt")
    sent = verdict(question("x", "receipt"), step="receipt", output='{"number": "r-1", "amount": 9.90}')
    console.post(url("execution_verdict", "x"), sent)
    monkeypatch.setattr(codec, "_by_name", {})
    page = console.get(url("execution_change", "x"))
    assert page.status_code == 200
    assert "tests.admin.Receipt" in page.content.decode()
