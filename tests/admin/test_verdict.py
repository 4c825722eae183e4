"""The verdict, from the queue to the log."""

from __future__ import annotations

import pytest

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import in_doubt, kinds, url, verdict

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_queue_names_step_key_and_cause(console):
    """The home of the console shows what is needed to ask the provider."""
    in_doubt("order-1")
    page = console.get(url("in_doubt"))
    assert page.status_code == 200
    for text in ("transfer", "order-1", "order-1:transfer", "the line went dead", "pay"):
        assert text in page.content.decode()
    assert url("execution_verdict", "order-1", step="transfer") in page.content.decode()


def test_a_verdict_is_previewed_and_then_given(console):
    """The form leads over a preview, that writes nothing, to the event in the log."""
    sequence = in_doubt("order-1")
    form = console.get(url("execution_verdict", "order-1", step="transfer"))
    assert form.context["form"].initial == {"step": "transfer", "question": sequence}
    before = kinds("order-1")

    preview = console.post(url("execution_verdict", "order-1"), verdict(sequence, stage="preview"))
    assert preview.status_code == 200
    assert "EXECUTION_RESUMED" in preview.content.decode()
    assert kinds("order-1") == before

    done = console.post(url("execution_verdict", "order-1"), verdict(sequence), follow=True)
    assert done.redirect_chain == [(url("execution_change", "order-1"), 302)]
    state = loom.state("order-1")
    assert (state.status, state.result) == (Status.COMPLETED, "tx-7")
    [resumed] = loom.history("order-1", kinds=["EXECUTION_RESUMED"])
    assert (resumed.data["principal"], resumed.data["reason"]) == ("anna", "seen at the bank")
    assert f"event {resumed.sequence}" in done.content.decode()


def test_the_queue_tells_what_the_tool_raised(console):
    """Class and message: it is the first thing to ask a provider about."""
    flows.bank.append(ConnectionError("read timed out after 30 s"))
    in_doubt("order-1")
    assert "ConnectionError: read timed out after 30 s" in console.get(url("in_doubt")).content.decode()
    form = console.get(url("execution_verdict", "order-1", step="transfer"))
    assert "ConnectionError: read timed out after 30 s" in form.content.decode()
