"""Every error can be sent to another process, read by a program, and understood by a person."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from django.core.exceptions import PermissionDenied

from loom_django import errors
from loom_django.errors import LoomError

AT = datetime(2026, 3, 1, 2, 14, tzinfo=UTC)

EXAMPLES: list[LoomError] = [
    errors.LoomError("plain"),
    errors.StepFailed("charge", "stripe.CardError", "declined", ["stripe.StripeError"], "Traceback …"),
    errors.ChildFailed("order-1/ship#1", "FAILED", "builtins.KeyError", "'sku'"),
    errors.ChildFailed("order-1/ship#1", "CANCELLED"),
    errors.WaitTimedOut("Approval", "42", AT),
    errors.WaitTimedOut("Approval", None, AT),
    errors.EffectInDoubt("the line broke"),
    errors.DefinitionError("order", "has no steps"),
    errors.DefinitionError(tool="charge", problem="is a method"),
    errors.DefinitionError(problem="is not right"),
    errors.ScheduleDefinitionError("nightly", "cron", "61 * * * *", "has a minute above 59"),
    errors.InvalidInputError("missing argument 'order_id'", "order"),
    errors.InvalidInputError("timeout is negative"),
    errors.UnencodableValueError('args[0]["a"]', "shop.models.Purchase", "Pass the pk."),
    errors.UnreadableValueError("no type is registered as shop.Money", "shop.Money"),
    errors.PayloadTooLargeError(2_000_000, 1_048_576, "the result"),
    errors.InvalidIdError("a\nb", "execution id"),
    errors.UndeclaredStepError("send_mail", "order", ["charge", "refund"]),
    errors.DuplicateStepError("ship#2", 'flows.py:41 by ship.keyed("2")', "flows.py:47"),
    errors.DuplicateBranchError("a", "b"),
    errors.HistoryLimitError("x", 50_000, 50_000),
    errors.ContextMisuseError("used from another thread; use ctx.parallel"),
    errors.DirectCallError("charge"),
    errors.DirectCallError("order", "flow"),
    errors.OpenTransactionError("ctx.run"),
    errors.FlowNotFoundError("order", ["audit"], 3),
    errors.ScheduleNotFoundError("nightly", ["weekly"]),
    errors.ExecutionNotFoundError("order-17"),
    errors.ExecutionConflictError("order-17", "input"),
    errors.ResumeRefusedError("order-17", "no-such-wait", "It waits for Approval since 02:14."),
    errors.VerdictRefusedError("order-17", "stale-park", "wire", "anna", AT, 41),
    errors.VerdictRefusedError("order-17", "not-suspended", step_id="wire"),
    errors.ExecutionClosedError("order-17", "COMPLETED"),
    errors.OperatorDeniedError("loom.resolve_step", "bob", "order-17"),
    errors.ResumeContendedError("order-17", 3),
    errors.RedriveExhaustedError("order-17", 8),
    errors.StoreUnavailableError("the connection was lost", 5),
    errors.ArchiveError("loom/2026-11-30/a.jsonl.gz", "could not be written: no space left."),
    errors.StaleFenceError("order-17", 3, 4),
    errors.StaleFenceError("order-17", None, None),
    errors.FlowCodeMismatchError("order-17", "structural hash", "ab12", "cd34", ["step charge is gone"]),
    errors.FlowDivergenceError("order-17", ["charge"], "step 'refund'", "flows.py:12"),
    errors.ExecutionFailedError("order-17", "builtins.KeyError", "'sku'"),
    errors.ExecutionCancelledError("order-17", "asked by the customer"),
    errors.ResultTimeoutError("order-17", 2.5),
    errors.ReadOnlyModelError("Execution", "Use loom.cancel(…)."),
]

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, LoomError) and value.__module__ == errors.__name__
]


def by_class(error: LoomError) -> str:
    return type(error).__name__


def test_every_class_has_an_example() -> None:
    """The table above misses no class, so that the tests below speak for all of them."""
    assert {type(example) for example in EXAMPLES} == set(CLASSES)


def travelled(error: LoomError) -> LoomError:
    again: LoomError = pickle.loads(pickle.dumps(error))  # noqa: S301
    return again


@pytest.mark.parametrize("again", [travelled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("error", EXAMPLES, ids=by_class)
def test_a_copy_keeps_attributes_and_message(
    error: LoomError, again: Callable[[LoomError], LoomError]
) -> None:
    """An error that crosses a process keeps its class, its message and each of its attributes."""
    twin = again(error)
    assert type(twin) is type(error)
    assert vars(twin) == vars(error)
    assert str(twin) == str(error) != ""


def test_notes_survive_pickling() -> None:
    """A note that somebody added to an error goes along."""
    error = errors.ExecutionNotFoundError("x")
    error.add_note("seen on node 3")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen on node 3"]  # noqa: S301


def test_codes_are_unique_words() -> None:
    """Programs tell errors apart by `code`, which each class sets for itself."""
    codes = [vars(cls)["code"] for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("-", "").isalpha() and code.islower() for code in codes)


@pytest.mark.parametrize("error", EXAMPLES[1:], ids=by_class)
def test_every_argument_is_an_attribute(error: LoomError) -> None:
    """What a constructor takes can be read back from the error under the same name."""
    assert set(inspect.signature(type(error)).parameters) <= set(vars(error))


# The class that an except clause of ordinary code would name.
@pytest.mark.parametrize(
    ("error", "ordinary"),
    [
        (errors.InvalidInputError("x"), TypeError),
        (errors.DirectCallError("charge"), TypeError),
        (errors.ResultTimeoutError("x", 1), TimeoutError),
        (errors.OperatorDeniedError("loom.resolve_step"), PermissionDenied),
        (errors.VerdictRefusedError("x", "terminal", "s"), errors.ResumeRefusedError),
        (errors.ScheduleDefinitionError("s", "cron", "x"), errors.DefinitionError),
    ],
)
def test_errors_are_what_ordinary_code_expects(error: LoomError, ordinary: type[Exception]) -> None:
    """Errors with a built-in twin are caught by its name too."""
    assert isinstance(error, ordinary)


def test_retry_me_is_not_refused() -> None:
    """An error that asks for another try says so and is none of the refusals."""
    retryable = {cls for cls in CLASSES if cls.retryable}
    assert retryable == {
        errors.ResumeContendedError,
        errors.RedriveExhaustedError,
        errors.StoreUnavailableError,
    }
    assert not any(issubclass(cls, errors.ResumeRefusedError) for cls in retryable)


# What each message must name: the value, the rule, the way out.
@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (errors.DirectCallError("charge"), ["charge is a tool", "ctx.run(charge", "charge.func(ctx"]),
        (errors.UndeclaredStepError("mail", "order", ["charge"]), ["order", "mail", "charge", "steps="]),
        (errors.PayloadTooLargeError(7, 5, "the result"), ["the result", "7", "5", "MAX_PAYLOAD_BYTES"]),
        (errors.FlowCodeMismatchError("x", "hash", "ab", "cd"), ["x", "ab", "cd", "Pin", "Migrate", "Drain"]),
        (errors.VerdictRefusedError("x", "stale-park", "wire", "anna", AT, 41), ["wire", "anna", "41"]),
        (errors.UnencodableValueError("args[0]", "a.B", "Pass the pk."), ["args[0]", "a.B", "Pass the pk."]),
        (errors.InvalidIdError("\n", "step id"), ["step id", "'\\n'", "1 to 255"]),
        (errors.ReadOnlyModelError("Execution", "Use loom.cancel."), ["Execution", "Use loom.cancel."]),
    ],
    ids=lambda value: by_class(value) if isinstance(value, LoomError) else "",
)
def test_messages_name_value_rule_and_way_out(error: LoomError, parts: list[str]) -> None:
    """A message holds what a beginner needs to go on."""
    assert [part for part in parts if part not in str(error)] == []


@pytest.mark.parametrize("reason", get_args(errors.RefusalReason))
def test_every_refusal_reason_has_its_own_message(reason: Any) -> None:
    """Each reason of the closed list explains itself."""
    assert len(str(errors.ResumeRefusedError("order-17", reason))) > len('"order-17" ')


def test_unknown_refusal_reason_is_refused() -> None:
    """The list of reasons is closed, so that callers can rely on it."""
    reason: Any = "because"
    with pytest.raises(ValueError, match="because"):
        errors.ResumeRefusedError("order-17", reason)


class Declined(KeyError):
    """A failure with built-in bases."""


# One row for each way of asking.
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Declined, True),
        (KeyError, True),
        (f"{__name__}.Declined", True),
        ("builtins.LookupError", True),
        ("KeyError", True),
        (OSError, False),
        ("Declined", False),
        ("other.Declined", False),
    ],
)
def test_matches_goes_by_recorded_names(asked: Any, expected: bool) -> None:
    """A failure is known by its class or any base, without the class being importable."""
    failed = errors.StepFailed(
        "charge", f"{__name__}.Declined", "no", ["builtins.KeyError", "builtins.LookupError"]
    )
    assert failed.matches(asked) is expected
    assert pickle.loads(pickle.dumps(failed)).matches(asked) is expected  # noqa: S301


def test_an_unpicklable_value_is_kept_as_text() -> None:
    """A refused value of any kind never keeps its error from travelling."""
    error = errors.ScheduleDefinitionError("nightly", "cron", lambda: None)
    assert pickle.loads(pickle.dumps(error)).value == error.value  # noqa: S301
    assert pickle.loads(pickle.dumps(errors.InvalidIdError(object()))).what == "id"  # noqa: S301


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    """A refusal never fails on the value that it is about, and never repeats all of a long one."""
    assert str(errors.InvalidIdError(10**9000)).startswith("id a int must be")
    assert len(str(errors.InvalidIdError("x" * 10_000))) < 200
