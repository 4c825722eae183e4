"""What a person may do, judged in one place: permission, reason, question; and a rehearsal that writes nothing."""

from __future__ import annotations

import enum
import logging
import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import pytest

from loom_django import StepContext, tool
from loom_django.errors import (
    ExecutionClosedError,
    ExecutionNotFoundError,
    InvalidInputError,
    OperatorDeniedError,
    PayloadTooLargeError,
    ResumeRefusedError,
    UnencodableValueError,
    VerdictRefusedError,
)
from loom_django.kernel import codec
from loom_django.kernel.state import Status
from loom_django.runtime import loom
from loom_django.services import operators, typed_json
from loom_django.services.operators import Act, Operator
from tests.admin import flows
from tests.admin.conftest import _clean_slate, diverged, in_doubt, kinds, question

__all__ = ["_clean_slate"]

database = pytest.mark.django_db(transaction=True)


@dataclass
class Person:
    """A user, as far as an operator's acts look at one."""

    name: str
    permissions: tuple[str, ...] = ()

    def get_username(self) -> str:
        return self.name

    def has_perm(self, permission: str) -> bool:
        return permission in self.permissions


SHELL = Operator("shell:tests")
BEN = Operator.of(Person("ben"))


def everything(execution_id: str) -> Any:
    """All that the store keeps of an execution."""
    store = loom.store
    return (
        [event.body for event in store.read(execution_id)],
        store.status(execution_id),
        store.fence(execution_id),
        store.wakes(execution_id),
        store.timers(execution_id),
        store.held(execution_id),
    )


# Who may.


@pytest.mark.once
def test_a_shell_is_trusted_and_a_user_is_asked():
    """Each act asks for its own permission."""
    assert SHELL.may(Act.CANCEL_EXECUTION)
    carl = Operator.of(Person("carl", ("loom.cancel_execution",)))
    assert [act for act in Act if carl.may(act)] == [Act.CANCEL_EXECUTION]
    assert Operator.at_shell().name.startswith("shell:")


ACTS: list[Any] = [
    lambda by, **options: operators.resolve_step(loom, by, "x", "transfer", "retry-fresh", **options),
    lambda by, **options: operators.resume_execution(loom, by, "x", "Approval", **options),
    lambda by, **options: operators.resume_execution(loom, by, "x", "EffectInDoubtResolved", **options),
    lambda by, **options: operators.cancel_execution(loom, by, "x", **options),
    lambda by, **options: operators.retry_error(loom, by, "x", **options),
    lambda by, **options: operators.retry_diverged(loom, by, "x", **options),
    lambda by, **options: operators.recover_execution(loom, by, "x", **options),
]


@database
@pytest.mark.parametrize("act", ACTS, ids=range(len(ACTS)))
def test_a_denial_is_a_fact_and_goes_before_everything_else(act):
    """Even before a missing reason, and of a rehearsal too: who may not act learns nothing of the log."""
    in_doubt("x")
    before = kinds("x")
    for options in ({"reason": "r"}, {"reason": ""}, {"reason": "r", "dry_run": True}):
        with pytest.raises(OperatorDeniedError) as caught:
            act(BEN, **options)
        assert caught.value.permission.startswith("loom.")
    assert kinds("x") == [*before, "EXECUTION_DENIED"]


@database
def test_a_denial_on_an_unknown_execution_is_just_that():
    """There is no log to write it to, and whether there is one is none of their business."""
    with pytest.raises(OperatorDeniedError):
        operators.cancel_execution(loom, BEN, "nobody", reason="r")
    with pytest.raises(ExecutionNotFoundError):
        operators.cancel_execution(loom, SHELL, "nobody", reason="r")


@database
def test_without_a_park_a_denial_is_recorded_once_a_minute():
    """A finished log grows by one event a minute at most, whoever tries how often."""
    flows.bank.append("tx")
    flows.pay.using(execution_id="x").start()
    moments = (0, 10, 59, 61, 70)  # seconds after the first attempt
    try:
        for moment, before in zip(moments, (0, *moments), strict=False):
            loom.store.shift_clock(timedelta(seconds=moment - before))
            with pytest.raises(OperatorDeniedError):
                operators.cancel_execution(loom, BEN, "x", reason="r")
    finally:
        loom.store.shift_clock(-timedelta(seconds=moments[-1]))
    assert kinds("x").count("EXECUTION_DENIED") == 2


@database
def test_two_equal_denials_at_once_are_one():
    """Both look, one appends; the other one looks again and finds it."""
    in_doubt("x")
    barrier = threading.Barrier(2)
    caught = []

    def attempt() -> None:
        barrier.wait()
        try:
            operators.cancel_execution(loom, BEN, "x", reason="r")
        except OperatorDeniedError as exc:
            caught.append(exc)
        finally:
            loom.store.close_connections()

    threads = [threading.Thread(target=attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caught) == 2
    assert kinds("x").count("EXECUTION_DENIED") == 1


@database
def test_a_denial_that_cannot_be_recorded_is_a_denial_still(monkeypatch, caplog):
    """The refusal stands; the failure is logged."""
    in_doubt("x")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the database is away")

    monkeypatch.setattr(operators, "append_note", fail)
    with caplog.at_level(logging.ERROR, "loom_django.operators"), pytest.raises(OperatorDeniedError):
        operators.cancel_execution(loom, BEN, "x", reason="r")
    assert "a denial could not be recorded" in caplog.text


# Why.


@database
@pytest.mark.parametrize(
    "act", ACTS[:2] + ACTS[3:], ids=["resolve", "resume", "cancel", "retry", "diverged", "recover"]
)
@pytest.mark.parametrize("reason", ["", " \n\t", "x" * (operators.MAX_REASON + 1)])
def test_an_act_needs_a_reason_of_sane_length(act, reason):
    """Without one nothing is appended."""
    in_doubt("x")
    before = everything("x")
    with pytest.raises(InvalidInputError, match="reason"):
        act(SHELL, reason=reason)
    assert everything("x") == before


# A rehearsal.


@database
def test_a_rehearsal_is_the_act_without_its_traces():
    """For each act: what it would append is what it appends then, and the store is as it was."""
    in_doubt("doubt")
    flows.ask.using(execution_id="ask").start()
    flows.bugs.append(ValueError("bug"))
    flows.buggy.using(execution_id="bug").start()
    flows.nap.using(execution_id="nap").start()
    diverged("shifted")
    acts: dict[str, Any] = {
        "doubt": lambda **o: operators.resolve_step(
            loom, SHELL, "doubt", "transfer", "completed-with-result", output=1, reason="r", **o
        ),
        "ask": lambda **o: operators.resume_execution(
            loom, SHELL, "ask", "Approval", payload=[1], reason="r", **o
        ),
        "bug": lambda **o: operators.retry_error(loom, SHELL, "bug", reason="r", **o),
        "shifted": lambda **o: operators.retry_diverged(loom, SHELL, "shifted", reason="r", **o),
        "nap": lambda **o: operators.cancel_execution(loom, SHELL, "nap", reason="r", **o),
    }
    for execution_id, act in acts.items():
        before = everything(execution_id)
        rehearsed = act(dry_run=True)
        assert everything(execution_id) == before
        done = act()
        assert [(event.sequence, event.kind) for event in rehearsed.events] == [
            (event.sequence, event.kind) for event in done.events
        ]
        assert (rehearsed.runs, rehearsed.act) == (done.runs, done.act)
        recorded = loom.history(execution_id)[done.events[0].sequence - 1]
        assert recorded.body == done.events[0].body
        for place in ("wait", "payload", "principal", "reason"):
            assert recorded.data.get(place) == rehearsed.events[0].data.get(place)


@database
def test_a_cancel_of_a_running_execution_is_rehearsed_without_fencing_its_holder(settings):
    """The real one moves the token and puts the step under way in doubt; the rehearsal only says so."""
    settings.LOOM = {"DISPATCHER": "worker"}
    flows.pay.using(execution_id="x").start()
    before = everything("x")
    done = operators.cancel_execution(loom, SHELL, "x", reason="r", dry_run=True)
    assert [event.kind for event in done.events] == ["EXECUTION_CANCELLED"]
    assert everything("x") == before
    operators.cancel_execution(loom, SHELL, "x", reason="r")
    assert loom.store.fence("x") > 0


@database
def test_a_rehearsal_refuses_what_the_act_would_refuse():
    """With the same error."""
    in_doubt("x")
    loom.resolve("x", "transfer", "completed-with-result", output=1, principal="anna")
    with pytest.raises(VerdictRefusedError, match="answered by anna"):
        operators.resolve_step(loom, SHELL, "x", "transfer", "fail", reason="r", dry_run=True)
    with pytest.raises(ExecutionClosedError):
        operators.cancel_execution(loom, SHELL, "x", reason="r", dry_run=True)


# The question.


@database
def test_a_question_is_judged_at_the_append_and_not_before(monkeypatch):
    """An answer that slips in between the look and the append is seen by the next look."""
    flows.ask.using(execution_id="x").start(rounds=2)
    store = loom.store
    slipped: list[bool] = []
    load = type(store).load

    def late(self: Any, execution_id: str, **options: Any) -> Any:
        found = load(self, execution_id, **options)
        if not slipped:
            slipped.append(True)
            loom.resume("x", event_type="Approval", payload="first", principal="anna")
        return found

    monkeypatch.setattr(type(store), "load", late)
    with pytest.raises(ResumeRefusedError, match="answered by anna"):
        operators.resume_execution(
            loom, SHELL, "x", "Approval", payload="second", question="wait:Approval#1", reason="r"
        )
    waits = loom.state("x").waits
    assert codec.decode(waits["wait:Approval#1"].answer) == "first"
    assert waits["wait:Approval#2"].pending


@database
@pytest.mark.parametrize("wrong", [1, 2, 999])
def test_a_verdict_on_another_question_is_refused(wrong):
    """Sequences that asked nothing."""
    in_doubt("x")
    before = everything("x")
    with pytest.raises(VerdictRefusedError) as caught:
        operators.resolve_step(loom, SHELL, "x", "transfer", "retry-fresh", question=wrong, reason="r")
    assert caught.value.reason == "stale-park"
    assert everything("x") == before


@database
def test_a_reserved_wait_is_not_answered_by_a_resume():
    """Each has its own act, with its own permission."""
    in_doubt("x")
    for name in ("EffectInDoubtResolved", "__loom_error__", "CHILD_DONE", "__loom_timer__"):
        with pytest.raises(ResumeRefusedError) as caught:
            operators.resume_execution(loom, SHELL, "x", name, payload={}, reason="r")
        assert caught.value.reason == "reserved-wait"


@database
def test_a_fresh_key_is_told_before_and_after():
    """The next generation of the step's key."""
    asked = in_doubt("x")
    for generation in (1, 2):
        options: Any = {"question": asked, "reason": "r"}
        rehearsed = operators.resolve_step(
            loom, SHELL, "x", "transfer", "retry-fresh", dry_run=True, **options
        )
        done = operators.resolve_step(loom, SHELL, "x", "transfer", "retry-fresh", **options)
        assert rehearsed.fresh_key == done.fresh_key == f"x:transfer:r{generation}"
        asked = question("x")


@database
def test_the_body_goes_on_with_the_engine_of_everybody(monkeypatch):
    """What watched one act is gone when the flow runs."""
    flows.ask.using(execution_id="x").start()
    seen: list[Any] = []
    monkeypatch.setattr(
        loom.dispatcher, "dispatch", lambda execution_id, ticket, journal: seen.append(journal.engine)
    )
    operators.resume_execution(loom, SHELL, "x", "Approval", question="wait:Approval#1", reason="r")
    assert seen == [loom.engine]


@database
def test_an_answer_keeps_its_reason():
    """In the log, beside its principal."""
    flows.ask.using(execution_id="x").start()
    operators.resume_execution(loom, SHELL, "x", "Approval", reason=" the boss said so ")
    [resumed] = loom.history("x", kinds=["EXECUTION_RESUMED"])
    assert (resumed.data["principal"], resumed.data["reason"]) == ("shell:tests", "the boss said so")


@database
def test_acts_are_logged_with_their_principal(caplog):
    """For whoever watches the log of the process."""
    in_doubt("x")
    with caplog.at_level(logging.INFO, "loom_django.operators"):
        operators.cancel_execution(loom, SHELL, "x", reason="wrong order")
    [record] = [entry for entry in caplog.records if entry.name == "loom_django.operators"]
    assert (record.principal, record.act, record.reason) == (
        "shell:tests",
        "cancel_execution",
        "wrong order",
    )


# Recovery.


@database
def test_recovering_takes_an_execution_from_its_holder(settings):
    """Whatever the lease says; the predecessor is fenced out, and the step under way put in doubt."""
    settings.LOOM = {"DISPATCHER": "worker"}
    flows.pay.using(execution_id="x").start()
    assert loom.store.claim("x", owner="dead:1:a", token=7, ttl=3600)
    done = operators.recover_execution(loom, SHELL, "x", reason="its machine is gone")
    assert done.runs == "worker"
    assert loom.store.held("x") is None
    assert loom.store.status("x") in (Status.PENDING, Status.RUNNING)
    assert loom.store.fence("x") > 0


@database
def test_recovering_lets_a_poisoned_execution_go_on(settings):
    """It was parked after too many takeovers; the act answers that park."""
    settings.LOOM = {"DISPATCHER": "worker", "MAX_RECOVERIES": 1}
    flows.ask.using(execution_id="x").start()
    for token in (7, 8):
        assert loom.store.claim("x", owner="dead:1:a", token=token, ttl=3600)
        operators.recover_execution(loom, SHELL, "x", reason="again")
    assert loom.state("x").pending_waits[0].on == "__loom_poisoned__"
    done = operators.recover_execution(loom, SHELL, "x", reason="fixed its data")
    assert [event.kind for event in done.events] == ["EXECUTION_RESUMED"]
    assert loom.store.status("x") == Status.RUNNING


@database
def test_nobody_is_recovered_from_nobody():
    """What is parked or over has no holder."""
    in_doubt("x")
    for _ in range(2):
        with pytest.raises(ResumeRefusedError, match="Nobody holds it"):
            operators.recover_execution(loom, SHELL, "x", reason="r")
        if not loom.state("x").finished:
            loom.cancel("x")


# What a verdict says.


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal
    colour: Colour | None = None


@pytest.fixture
def types_known(monkeypatch):
    """The classes above, registered for one test."""
    monkeypatch.setattr(codec, "_by_class", dict(codec._by_class))
    monkeypatch.setattr(codec, "_by_name", dict(codec._by_name))
    codec.register_type(Colour, name="tests.operators.Colour")
    codec.register_type(Line, name="tests.operators.Line")


FITS = [
    (Any, "1.5", 1.5),
    (Any, '{"a": [1, 2.0]}', {"a": [1, 2.0]}),
    (int, "10000000000000000000000000000000000000000", 10**40),
    (float, "3", 3.0),
    (float, "0.1", 0.1),
    (str, '"tx"', "tx"),
    (bool, "true", True),
    (None, "null", None),
    (type(None), "null", None),
    (Decimal, "9.90", Decimal("9.90")),  # never by way of a float
    (Decimal, "0.1000000000000000055511151231257827", Decimal("0.1000000000000000055511151231257827")),
    (Decimal, '"9.90"', Decimal("9.90")),
    (Decimal, "7", Decimal(7)),
    (datetime, '"2026-01-31T08:30:00+00:00"', datetime(2026, 1, 31, 8, 30, tzinfo=UTC)),
    (date, '"2026-01-31"', date(2026, 1, 31)),
    (UUID, '"2f1e0a52-8a44-4d0e-9c55-0d6f6a3c1b7e"', UUID("2f1e0a52-8a44-4d0e-9c55-0d6f6a3c1b7e")),
    (list[Decimal], "[1.10, 2]", [Decimal("1.10"), Decimal(2)]),
    (list, "[1.5]", [1.5]),
    (tuple[int, str], '[1, "a"]', (1, "a")),
    (tuple[int, ...], "[1, 2]", (1, 2)),
    (set[int], "[1, 1]", {1}),
    (frozenset[str], '["a"]', frozenset({"a"})),
    (dict[str, Decimal], '{"a": 1.10}', {"a": Decimal("1.10")}),
    (dict[str, Any], '{"a": 1.5}', {"a": 1.5}),
    (int | None, "null", None),
    (int | str, '"a"', "a"),
    (Literal["a", 1], "1", 1),
    (Colour, '"RED"', Colour.RED),  # by its name
    (Colour, '"b"', Colour.BLUE),  # by its value
    (Line, '{"sku": "s", "price": 1.10}', Line("s", Decimal("1.10"))),
    (Line, '{"sku": "s", "price": 1, "colour": "RED"}', Line("s", Decimal(1), Colour.RED)),
    (list[Line], '[{"sku": "s", "price": 1}]', [Line("s", Decimal(1))]),
    (object, '{"a": 1.5}', {"a": 1.5}),  # an annotation that says nothing
    ("NotHere", "1.5", 1.5),
]


@pytest.mark.once
@pytest.mark.usefixtures("types_known")
@pytest.mark.parametrize(("kind", "text", "value"), FITS)
def test_json_becomes_what_the_annotation_says(kind, text, value):
    """Equal and of the same type, all the way down."""
    found = typed_json.read_as(kind, text, "the output")
    assert found == value
    assert repr(found) == repr(value)


MISFITS = [
    (int, "1.0", "an integer"),
    (int, "true", "an integer"),
    (int, '"1"', "an integer"),
    (float, "true", "a number"),
    (str, "1", "text"),
    (bool, "1", "true or false"),
    (None, "0", "null"),
    (Decimal, '"much"', "a number"),
    (Decimal, "true", "a number"),
    (datetime, '"yesterday"', "text as"),
    (datetime, "5", "text as"),
    (list[int], '{"a": 1}', "a list"),
    (list[int], '[1, "a"]', r"the output\[1\]"),
    (tuple[int, str], "[1]", "a list of 2 items"),
    (set[Any], "[[1]]", "unhashable"),
    (dict[str, int], "[1]", "an object"),
    (dict[str, int], '{"a": "b"}', r"the output\['a'\]"),
    (int | None, '"a"', "or: "),
    (Literal["a"], '"b"', "one of 'a'"),
    (Colour, '"GREEN"', "one of RED, BLUE"),
    (Colour, "[]", "one of RED, BLUE"),
    (Line, '{"sku": "s"}', "makes no Line"),
    (Line, '{"sku": "s", "price": 1, "x": 2}', "has no field 'x'"),
    (Line, "[]", "an object with the fields of Line"),
    (Any, "NaN", "is not JSON"),
    (Any, "-Infinity", "is not JSON"),
    (Any, '{"a": 1, "a": 2}', "stands twice"),
    (Any, "", "null if there is none"),
    (Any, "tx-7", "double quotes"),
    (Any, '{"a": }', "line 1, column 7"),
    (Any, "1" * 5000, "cannot be read"),
    (Any, "[" * 100_000, "nested too deeply"),
]


@pytest.mark.once
@pytest.mark.usefixtures("types_known")
@pytest.mark.parametrize(("kind", "text", "says"), MISFITS, ids=range(len(MISFITS)))
def test_what_does_not_fit_is_said_with_its_place(kind, text, says):
    """Nothing is guessed."""
    with pytest.raises(InvalidInputError, match=says):
        typed_json.read_as(kind, text, "the output")


@pytest.mark.once
def test_plain_json_keeps_its_numbers():
    """Without an annotation a number with a point is a float, an integer of any size itself."""
    found = typed_json.read('{"a": 9007199254740993, "b": 1.5}')
    assert found == {"a": 9007199254740993, "b": 1.5}
    assert type(found["b"]) is float


@database
def test_the_tool_of_a_step_says_what_its_result_is():
    """Through its parser if it has one, else by its annotation; a step that nobody knows takes any JSON."""
    flows.receipts.using(execution_id="r").start("receipt")
    read = operators.read_output
    assert read(loom, "r", "receipt", '{"number": "n", "amount": 1.10}') == flows.Receipt(
        "n", Decimal("1.10")
    )
    assert read(loom, "r", "receipt#7", '{"number": "n", "amount": 1}') == flows.Receipt("n", Decimal(1))
    assert read(loom, "r", "unknown", "1.5") == 1.5
    assert read(loom, "r", "even", "2") == 2
    with pytest.raises(InvalidInputError, match="an even number, please"):
        read(loom, "r", "even", "1")
    with pytest.raises(ExecutionNotFoundError):
        read(loom, "nobody", "even", "1")


@database
@pytest.mark.parametrize(
    ("parse", "error", "says"),
    [
        (lambda value: 1 / 0, InvalidInputError, "ZeroDivisionError"),
        (lambda value: int("x"), InvalidInputError, "invalid literal"),
        (lambda value: object(), UnencodableValueError, "object"),
        (lambda value: "x" * 2_000_000, PayloadTooLargeError, "bytes"),
    ],
)
def test_a_parser_that_fails_is_a_message_and_not_a_500(monkeypatch, parse, error, says):
    """Whatever the project's code does with what was typed."""
    flows.receipts.using(execution_id="r").start("even")
    monkeypatch.setattr(flows.even, "parse_output", parse)
    with pytest.raises(error, match=says):
        operators.read_output(loom, "r", "even", "2")


@pytest.mark.once
def test_annotations_that_cannot_be_read_say_nothing():
    """Names that exist for a type checker only."""

    @tool
    def odd(ctx: StepContext) -> Any: ...

    odd.func.__annotations__["return"] = "NotHere"
    assert operators.returns(odd) is Any
    assert operators.returns(None) is Any
