"""What a person types is what the flow gets: every digit, and of the type that the tool returns."""

from __future__ import annotations

from decimal import Decimal

import pytest

from loom_django.kernel import codec
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import in_doubt, kinds, question, url, verdict

pytestmark = pytest.mark.django_db(transaction=True)

BIG = [9007199254740993, -(2**63), 2**64, 10**40]


@pytest.mark.parametrize("number", BIG)
@pytest.mark.parametrize("form", ["{}", '{{"id": {}}}', "[{0}, {0}]"])
def test_integers_keep_their_digits(console, number, form):
    """In the flow, the log, the preview and on the page; also after the form was shown again."""
    text = form.format(number)
    sequence = in_doubt("x")
    sent = verdict(sequence, output=text)
    address = url("execution_verdict", "x")
    assert str(number) in console.post(address, {**sent, "stage": "preview"}).content.decode()
    again = console.post(address, {**sent, "stage": "edit"})
    assert again.context["form"].initial["output"] == text
    console.post(address, {**sent, "output": again.context["form"].initial["output"]})

    result = loom.handle("x").result()
    assert str(number) in str(result)
    [resumed] = loom.history("x", kinds=["EXECUTION_RESUMED"])
    assert codec.decode(resumed.data["payload"])["output"] == result
    assert str(number) in console.get(url("execution_change", "x")).content.decode()


def test_an_answer_keeps_its_digits(console):
    """The same for the payload of a resume."""
    flows.ask.using(execution_id="x").start()
    sent = {"question": "wait:Approval#1", "payload": str(10**40), "reason": "r", "stage": "confirm"}
    console.post(url("execution_resume", "x"), sent)
    assert loom.handle("x").result() == [10**40]


def test_a_registered_dataclass_is_made_of_its_fields(console):
    """The return annotation says what the JSON stands for; a decimal keeps its digits."""
    flows.receipts.using(execution_id="x").start("receipt")
    form = console.get(url("execution_verdict", "x", step="receipt"))
    assert "Receipt" in form.content.decode()
    sent = verdict(question("x", "receipt"), step="receipt", output='{"number": "r-1", "amount": 9.90}')
    assert console.post(url("execution_verdict", "x"), sent).status_code == 302
    assert loom.handle("x").result() == flows.Receipt("r-1", Decimal("9.90"))


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ('{"number": "r-1"}', "makes no Receipt"),
        ('{"number": 1, "amount": 1}', "the output.number is to be text"),
        ('{"number": "r", "amount": "much"}', "the output.amount is to be a number"),
        ('{"number": "r", "amount": 1, "tax": 2}', "has no field &#x27;tax&#x27;"),
        ('"r-1"', "is to be an object with the fields of Receipt"),
        ("{", "this is not JSON"),
        ('{"number": "a", "number": "b"}', "stands twice"),
    ],
)
def test_what_does_not_fit_is_said_at_the_field(console, output, says):
    """The form comes back with the message at the result, and nothing is appended."""
    flows.receipts.using(execution_id="x").start("receipt")
    before = kinds("x")
    for stage in ("preview", "confirm"):
        sent = verdict(question("x", "receipt"), step="receipt", output=output, stage=stage)
        page = console.post(url("execution_verdict", "x"), sent)
        assert page.status_code == 200
        assert list(page.context["form"].errors) == ["output"]
        assert says in page.content.decode()
    assert kinds("x") == before


def test_a_tools_own_parser_has_the_word(console):
    """The message of its ValueError is the form's; what it returns is the result."""
    flows.receipts.using(execution_id="x").start("even")
    asked = question("x", "even")
    page = console.post(url("execution_verdict", "x"), verdict(asked, step="even", output="7"))
    assert page.context["form"].errors["output"] == ["an even number, please"]
    console.post(url("execution_verdict", "x"), verdict(asked, step="even", output=str(10**40)))
    assert loom.handle("x").result() == 10**40


@pytest.mark.parametrize(
    "sent",
    [
        {"resolution": "completed-with-result", "output": ""},
        {"resolution": "retry-fresh", "output": "1"},
        {"resolution": "fail", "output": "1"},
        {"resolution": "retry-fresh", "output": "", "error": "no"},
        {"resolution": "retry_fresh"},
        {"resolution": "completed-with-result", "output": '"' + "x" * 1_100_000 + '"'},
    ],
)
def test_contradictions_are_said_and_not_guessed(console, sent):
    """A result without a completion, or the other way round, and a result that cannot be recorded."""
    sequence = in_doubt("x")
    before = kinds("x")
    page = console.post(url("execution_verdict", "x"), verdict(sequence, **sent))
    assert page.status_code == 200
    assert page.context["form"].errors
    assert kinds("x") == before


def test_a_failure_carries_the_operators_words(console):
    """The flow sees a failed step with this message."""
    sequence = in_doubt("x")
    console.post(url("execution_verdict", "x"), verdict(sequence, "fail", error="account closed"))
    error = loom.state("x").error
    assert error
    assert (error["type"], error["message"]) == ("OperatorVerdict", "account closed")


def test_a_fresh_retry_is_previewed_with_its_new_key(console):
    """The preview names the key that the provider will see, and the one that it may have seen."""
    sequence = in_doubt("x")
    page = console.post(url("execution_verdict", "x"), verdict(sequence, "retry-fresh", stage="preview"))
    assert ">x:transfer:r1<" in page.content.decode()
    assert ">x:transfer<" in page.content.decode()


def test_what_a_late_call_returned_is_shown(console):
    """The result of a call that nobody waited for stands on the form, and is not applied."""
    from loom_django.engine.outside import note
    from loom_django.kernel.events import Encoded, Kind

    in_doubt("x")
    fields = {"step": "transfer", "elapsed_ms": 41000, "output": Encoded('"tx-late"')}
    note(loom.engine, "x", Kind.EFFECT_RETURNED_LATE, fields)
    page = console.get(url("execution_verdict", "x", step="transfer")).content.decode()
    assert "tx-late" in page
    assert "41 s" in page
