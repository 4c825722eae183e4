"""An act and its two records land together, and the flow goes on after the commit."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import LOOK, client_of, in_doubt, kinds, make_user, question, url, verdict

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=[False, True], ids=["autocommit", "atomic-requests"])
def atomic_requests(request, monkeypatch):
    """With and without a transaction around each request."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", request.param)
    return request.param


@pytest.fixture
def by_worker(settings):
    """Flows are run by a worker, of which there is none here."""
    settings.LOOM = {"DISPATCHER": "worker"}


def test_an_act_is_in_the_log_and_in_the_admins_history(console, atomic_requests):
    """Who, what, why, and which event."""
    sequence = in_doubt("x")
    answer = console.post(url("execution_verdict", "x"), verdict(sequence), follow=True)
    assert "in this web process" in answer.content.decode()
    assert loom.state("x").status == Status.COMPLETED
    [resumed] = loom.history("x", kinds=["EXECUTION_RESUMED"])
    [entry] = LogEntry.objects.all()
    assert entry.get_change_message() == (
        f"resolve step transfer as completed-with-result (event {resumed.sequence}): seen at the bank"
    )
    history = console.get(url("execution_history", "x")).content.decode()
    assert "seen at the bank" in history


def test_a_body_runs_outside_of_the_requests_transaction(console, atomic_requests, monkeypatch):
    """Its steps are durable one by one, and its failure does not undo the act."""
    seen = []
    sequence = in_doubt("x")
    flows.bank.append(lambda: None)  # a value that cannot be recorded: in doubt again

    def spy(execution_id, ticket, journal, original=loom.dispatcher.dispatch):
        seen.append(connection.in_atomic_block)
        original(execution_id, ticket, journal)

    monkeypatch.setattr(loom.dispatcher, "dispatch", spy)
    answer = console.post(url("execution_verdict", "x"), verdict(sequence, "retry-fresh"))
    assert answer.status_code == 302
    assert seen == [False]
    assert question("x") > sequence


def test_a_copy_and_a_woken_flow_run_outside_of_the_requests_transaction(
    console, atomic_requests, monkeypatch
):
    """A fork's body and the one that takes a message begin after the commit."""
    flows.listen.using(execution_id="x").start()
    flows.ask.using(execution_id="z").start()
    seen = []

    def spy(execution_id, ticket, journal, original=loom.dispatcher.dispatch):
        seen.append((execution_id, connection.in_atomic_block))
        original(execution_id, ticket, journal)

    monkeypatch.setattr(loom.dispatcher, "dispatch", spy)
    sent = {"reason": "r", "stage": "confirm"}
    message = {**sent, "name": "carrier", "payload": "1", "message_id": "m"}
    assert console.post(url("execution_send", "x"), message).status_code == 302
    copy = {**sent, "from_step": "label", "version": "", "new_id": "y"}
    assert console.post(url("execution_fork", "z"), copy).status_code == 302
    assert seen == [("x", False), ("y", False)]
    assert (loom.state("x").result, loom.state("y").parked) == (1, True)


def test_with_workers_an_act_leaves_the_execution_ready(console, by_worker, atomic_requests):
    """No body runs in the request, and the message says who takes it up."""
    flows.pay.using(execution_id="x").start()
    run_ready()
    answer = console.post(url("execution_verdict", "x"), verdict(question("x")), follow=True)
    assert "A worker takes it up." in answer.content.decode()
    from loom_django.models import Execution

    row = Execution.objects.get(pk="x")
    assert (row.status, row.ready_at is not None, row.lease_token) == ("RUNNING", True, None)
    assert kinds("x")[-1] == "EXECUTION_RESUMED"
    run_ready()
    assert loom.state("x").result == "tx-7"


def run_ready() -> None:
    """What a worker would do with one execution."""
    from loom_django.engine.run import run_execution
    from loom_django.services.dispatch import claim_one

    token = claim_one(loom.engine, "x")
    assert token is not None
    run_execution(loom.engine, "x", token=token, fence=None)


def test_a_denial_outlives_the_requests_transaction(atomic_requests, db):
    """A 403 is returned, not raised: an exception would undo the record of the attempt."""
    in_doubt("x")
    client = client_of(make_user("ben", *LOOK))
    for _ in range(2):
        assert client.post(url("execution_cancel", "x"), {"reason": "r"}).status_code == 403
    assert kinds("x").count("EXECUTION_DENIED") == 1


def test_a_refusal_leaves_nothing_behind(console, atomic_requests):
    """Neither in the log nor in the history."""
    sequence = in_doubt("x")
    loom.resolve("x", "transfer", "completed-with-result", output=1)
    before = kinds("x")
    assert console.post(url("execution_verdict", "x"), verdict(sequence)).status_code == 409
    assert kinds("x") == before
    assert LogEntry.objects.count() == 0


def test_an_act_whose_history_cannot_be_written_is_undone(console, monkeypatch):
    """The two records land together or not at all."""
    sequence = in_doubt("x")
    before = kinds("x")

    def fail(*args, **kwargs):
        raise RuntimeError("no history today")

    monkeypatch.setattr("loom_django.admin.executions.ExecutionAdmin.log_change", fail)
    with pytest.raises(RuntimeError, match="no history today"):
        console.post(url("execution_verdict", "x"), verdict(sequence))
    assert kinds("x") == before
    assert loom.state("x").parked


def test_cancel_says_that_nothing_goes_on(console, atomic_requests):
    """After a cancel neither a worker nor this process runs the flow."""
    flows.ask.using(execution_id="x").start()
    sent = {"reason": "wrong customer", "stage": "confirm"}
    page = console.post(url("execution_cancel", "x"), sent, follow=True).content.decode()
    assert "A worker takes it up." not in page
    assert "in this web process" not in page
    state = loom.state("x")
    assert (state.status, state.reason) == (Status.CANCELLED, "wrong customer")


def test_a_message_leads_to_its_event(console):
    """The link in the message shows the log from there."""
    sequence = in_doubt("x")
    page = console.post(url("execution_verdict", "x"), verdict(sequence), follow=True)
    [resumed] = loom.history("x", kinds=["EXECUTION_RESUMED"])
    address = f"{url('execution_change', 'x')}?after={resumed.sequence - 1}#log"
    assert f'href="{address}"' in page.content.decode()
    rows = console.get(address).context["log"].rows
    assert rows[0].event.sequence == resumed.sequence
