"""An answer settles the question that was looked at, and no other one."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry

from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import client_of, in_doubt, kinds, make_user, put_off, question, url, verdict

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def bea(db):
    """Another operator, in another window."""
    return client_of(make_user("bea", "view_execution", "resolve_step", "resume_execution", "retry_error"))


def test_an_answered_question_is_refused_and_says_by_whom(console, bea):
    """The second window gets an ordinary page with the name, the time and the event; nothing is appended."""
    sequence = in_doubt("x", twice=True)
    assert console.post(url("execution_verdict", "x"), verdict(sequence)).status_code == 302
    [answer] = loom.history("x", kinds=["EXECUTION_RESUMED"])
    open_ = question("x", "second_transfer")
    before = kinds("x")

    late = bea.post(url("execution_verdict", "x"), verdict(sequence))
    text = late.content.decode()
    assert late.status_code == 409
    assert "answered by anna" in text
    assert f"event {answer.sequence}" in text
    assert "a verdict on second_transfer" in text  # what it asks now
    assert kinds("x") == before
    assert question("x", "second_transfer") == open_
    assert LogEntry.objects.count() == 1


def test_a_verdict_does_not_wander_to_the_next_step(console, bea):
    """A form of the first doubt that names the second step is refused by its question."""
    sequence = in_doubt("x", twice=True)
    console.post(url("execution_verdict", "x"), verdict(sequence))
    before = kinds("x")
    wandered = bea.post(url("execution_verdict", "x"), verdict(sequence, step="second_transfer"))
    assert wandered.status_code == 409
    assert kinds("x") == before


@pytest.mark.parametrize("stage", ["preview", "confirm"])
def test_the_same_step_in_doubt_anew_is_another_question(console, bea, stage):
    """After a fresh retry that got lost too, the old form is refused at its preview and at its end."""
    old = in_doubt("x")
    console.post(url("execution_verdict", "x"), verdict(old, "retry-fresh"))
    new = question("x")
    assert new != old
    before = kinds("x")
    assert bea.post(url("execution_verdict", "x"), verdict(old, stage=stage)).status_code == 409
    assert kinds("x") == before
    assert bea.post(url("execution_verdict", "x"), verdict(new)).status_code == 302
    assert loom.state("x").result == "tx-7"


def test_a_form_cannot_be_opened_for_what_is_settled(console):
    """A bookmark of an old question leads to the page that says who answered it."""
    sequence = in_doubt("x")
    console.post(url("execution_verdict", "x"), verdict(sequence))
    page = console.get(url("execution_verdict", "x", step="transfer"))
    assert page.status_code == 409
    assert "answered by anna" in page.content.decode()


def test_an_answer_to_an_earlier_wait_is_not_given_to_the_next_one(console, bea):
    """Two waits of one name, one after the other: the form names the wait."""
    flows.ask.using(execution_id="x").start(rounds=2)
    sent = {"question": "wait:Approval#1", "payload": '"yes"', "reason": "r", "stage": "confirm"}
    assert console.post(url("execution_resume", "x"), sent).status_code == 302
    before = kinds("x")
    late = bea.post(url("execution_resume", "x"), sent)
    assert late.status_code == 409
    assert "answered by anna" in late.content.decode()
    assert kinds("x") == before
    assert bea.post(url("execution_resume", "x"), {**sent, "question": "wait:Approval#2"}).status_code == 302
    assert loom.state("x").finished


def test_a_wait_that_never_was_is_refused(console):
    """A question that nobody asked is no slip that falls back to another one."""
    flows.ask.using(execution_id="x").start()
    before = kinds("x")
    for made_up in ("wait:Approval#7", "in-doubt:transfer:1", "EffectInDoubtResolved"):
        sent = {"question": made_up, "payload": "1", "reason": "r", "stage": "confirm"}
        assert console.post(url("execution_resume", "x"), sent).status_code == 409
    assert kinds("x") == before


def test_a_retry_is_of_the_error_that_was_looked_at(console, bea):
    """A second error after the first retry is another question."""
    flows.bugs.extend([ValueError("first"), ValueError("second")])
    flows.buggy.using(execution_id="x").start()
    sent = {"question": "error#1", "reason": "fixed", "stage": "confirm"}
    assert console.post(url("execution_retry_error", "x"), sent).status_code == 302
    before = kinds("x")
    assert bea.post(url("execution_retry_error", "x"), sent).status_code == 409
    assert kinds("x") == before
    assert bea.post(url("execution_retry_error", "x"), {**sent, "question": "error#2"}).status_code == 302
    assert loom.state("x").result == "fine"


def test_a_verdict_on_what_was_cancelled_is_refused(console):
    """The execution has ended; the page says so."""
    sequence = in_doubt("x")
    loom.cancel("x", reason="r")
    before = kinds("x")
    page = console.post(url("execution_verdict", "x"), verdict(sequence))
    assert page.status_code == 409
    assert "has ended" in page.content.decode()
    assert kinds("x") == before


def test_a_second_cancel_is_answered(console):
    """It is no error and appends nothing."""
    in_doubt("x")
    sent = {"reason": "r", "stage": "confirm"}
    console.post(url("execution_cancel", "x"), sent)
    before = kinds("x")
    again = console.post(url("execution_cancel", "x"), sent, follow=True)
    assert "cancelled already" in again.content.decode()
    assert kinds("x") == before


def test_a_cancel_of_what_completed_is_refused(console):
    """The log says how it ended; that stands."""
    flows.bank.append("tx-1")
    flows.pay.using(execution_id="x").start()
    page = console.post(url("execution_cancel", "x"), {"reason": "r", "stage": "confirm"})
    assert (page.status_code, "COMPLETED" in page.content.decode()) == (409, True)


@pytest.mark.parametrize("missing", ["reason", "question", "step", "resolution"])
def test_an_incomplete_form_does_nothing(console, missing):
    """It is shown again with what is missing."""
    sequence = in_doubt("x")
    before = kinds("x")
    sent = verdict(sequence)
    del sent[missing]
    page = console.post(url("execution_verdict", "x"), sent)
    assert page.status_code == 200
    assert missing in page.context["form"].errors
    assert kinds("x") == before


def test_a_blank_reason_is_none(console):
    """Spaces say nothing to whoever reads the log later."""
    sequence = in_doubt("x")
    before = kinds("x")
    page = console.post(url("execution_verdict", "x"), verdict(sequence, reason="  \n "))
    assert "reason" in page.context["form"].errors
    assert kinds("x") == before


def test_a_form_may_be_changed_after_its_preview(console):
    """Everything typed is kept, and nothing is written."""
    sequence = in_doubt("x")
    before = kinds("x")
    page = console.post(url("execution_verdict", "x"), verdict(sequence, stage="edit", output='{"a": 1}'))
    assert page.context["form"].initial["output"] == '{"a": 1}'
    assert not page.context["form"].errors
    assert kinds("x") == before


def test_changed_code_is_refused_on_an_ordinary_page(console, monkeypatch):
    """Nothing is appended to an execution that no registered flow can go on with."""
    sequence = in_doubt("x")
    before = kinds("x")
    from loom_django.definitions import registry

    monkeypatch.setitem(registry._flows, "pay", {})
    page = console.post(url("execution_verdict", "x"), verdict(sequence))
    assert page.status_code == 409
    assert kinds("x") == before
    assert console.get(url("execution_change", "x")).status_code == 200


def test_a_form_that_is_sent_twice_makes_one_execution(console):
    """The id travels with the form: the second time leads to the copy that was made."""
    flows.ask.using(execution_id="x").start()
    sent = {"from_step": "label", "version": "", "new_id": "y", "reason": "r", "stage": "confirm"}
    assert "y" in console.post(url("execution_fork", "x"), sent, follow=True).content.decode()
    before = kinds("y")
    again = console.post(url("execution_fork", "x"), sent, follow=True)
    assert "was made already" in again.content.decode()
    assert kinds("y") == before
    page = console.get(url("execution_change", "y")).content.decode()
    assert f'href="{url("execution_change", "x")}"' in page  # whose copy it is
    assert "label" in page


@pytest.mark.parametrize("stage", ["preview", "confirm"])
def test_a_copy_does_not_take_an_id_that_is_taken(console, bea, stage):
    """Neither a preview nor the act says that it would."""
    flows.ask.using(execution_id="x").start()
    flows.ask.using(execution_id="y").start()
    before = kinds("y")
    sent = {"from_step": "label", "version": "", "new_id": "y", "reason": "r", "stage": stage}
    page = console.post(url("execution_fork", "x"), sent)
    assert page.status_code == 409
    assert "exists already" in page.content.decode()
    assert kinds("y") == before


def test_a_rerun_is_of_what_has_failed(console):
    """A form that is guessed for another execution says so."""
    flows.ask.using(execution_id="x").start()
    page = console.post(url("execution_rerun", "x"), {"new_id": "y", "reason": "r", "stage": "confirm"})
    assert (page.status_code, "has not failed" in page.content.decode()) == (200, True)
    assert loom.store.status("y") is None


def test_a_message_that_is_sent_twice_is_one(console):
    """The message's id travels with the form."""
    flows.ask.using(execution_id="x").start()
    sent = {"name": "n", "payload": "1", "message_id": "m", "reason": "r", "stage": "confirm"}
    assert "in the inbox" in console.post(url("execution_send", "x"), sent, follow=True).content.decode()
    assert "sent already" in console.post(url("execution_send", "x"), sent, follow=True).content.decode()
    [message] = loom.store.inbox("x", "n")
    assert (message.principal, message.reason) == ("anna", "r")


def test_a_message_to_what_has_ended_is_refused(console):
    """On an ordinary page; nothing is stored."""
    flows.ask.using(execution_id="x").start()
    loom.cancel("x")
    sent = {"name": "n", "payload": "1", "message_id": "m", "reason": "r", "stage": "confirm"}
    assert console.post(url("execution_send", "x"), sent).status_code == 409
    assert loom.store.inbox("x", "n") == []


def test_an_outcome_is_noted_once_for_a_doubt(console):
    """Whoever comes second reads that the step is not in doubt any more; a note on the whole is always possible."""
    in_doubt("x")
    loom.cancel("x")
    queue = console.get(url("in_doubt")).content.decode()
    assert url("execution_outcome", "x", step="transfer") in queue
    sent = {"step": "transfer", "outcome": "paid", "payload": '{"tx": 7}', "reason": "r", "stage": "confirm"}
    assert console.post(url("execution_outcome", "x"), sent).status_code == 302
    before = kinds("x")
    assert console.post(url("execution_outcome", "x"), sent).status_code == 409
    assert kinds("x") == before
    assert console.post(url("execution_outcome", "x"), {**sent, "step": ""}).status_code == 302
    noted = loom.history("x", kinds=["OUTCOME_RECORDED"])
    assert [(event.data.get("step"), event.data["reason"]) for event in noted] == [
        ("transfer", "r"),
        (None, "r"),
    ]
    assert "Nothing is in doubt" in console.get(url("in_doubt")).content.decode()


def test_what_sleeps_is_not_woken_before_its_time(console):
    """A wake that is not due is left alone, and the page says when it is."""
    flows.nap.using(execution_id="x").start()
    [row] = loom.store.timers("x")
    page = console.post(url("execution_wake", "x"), {"reason": "r", "stage": "confirm"})
    assert page.status_code == 409
    assert row.wake_at.isoformat() in page.content.decode()
    assert loom.store.timers("x") == [row]
    assert url("execution_wake", "x") not in console.get(url("execution_change", "x")).content.decode()


def test_a_wake_that_was_put_off_is_left_to_a_loop(console):
    """Where a loop was seen alive, the row is due for it at once, and its tries count anew."""
    put_off("x")
    loom.store.beat("elsewhere:1:a", "timers")
    page = console.post(url("execution_wake", "x"), {"reason": "r", "stage": "confirm"}, follow=True)
    assert "tried now" in page.content.decode()
    [row] = loom.store.timers("x")
    assert row.not_before is not None
    assert row.not_before <= loom.store.now()
    assert loom.state("x").parked
