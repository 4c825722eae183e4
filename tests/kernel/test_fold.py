"""The fold: total, without gaps, the same step by step as at once."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loom_django.kernel import codec, events
from loom_django.kernel.events import (
    ANSWERING,
    CLASSIFICATION,
    TERMINAL,
    Encoded,
    Event,
    Kind,
    is_answering,
    pack,
)
from loom_django.kernel.fold import Fold, apply, fold
from loom_django.kernel.projection import project
from loom_django.kernel.state import ExecutionState, FrameStatus, Status, WaitStatus
from tests.kernel.test_codec import values

pytestmark = pytest.mark.once


def log(*facts: tuple[str, dict[str, Any]], fence: int | None = None) -> list[Event]:
    return [
        Event(
            "e1",
            place,
            kind,
            pack({"at": 1_000 + place, **fields}),
            fence=fence,
            is_kernel=kind in Kind.__members__,
        )
        for place, (kind, fields) in enumerate(facts, 1)
    ]


STARTED = ("EXECUTION_STARTED", {"flow": "f", "version": 1, "input": {"a": 1}, "hash": "sha256:x"})
STEP = ("STEP_STARTED", {"step": "s", "tool": "s", "idempotent": False, "args": {"args": [], "kwargs": {}}})
IN_DOUBT = ("EFFECT_INDOUBT", {"step": "s", "cause": "c", "key": "e1:s"})
VERDICT_WAIT = {"id": "in-doubt:s:1", "on": "EffectInDoubtResolved", "key": "s", "wake_at": None}
PARK = ("EXECUTION_SUSPENDED", {"reason": "effect-indoubt", "waits": [VERDICT_WAIT]})


def verdict(resolution: str, **more: Any) -> tuple[str, dict[str, Any]]:
    payload = {"step_id": "s", "resolution": resolution, **more}
    fields = {
        "wait": "in-doubt:s:1",
        "event": "EffectInDoubtResolved",
        "payload": payload,
        "principal": "anna",
    }
    return ("EXECUTION_RESUMED", fields)


def test_every_kernel_kind_is_classified_and_an_unclassified_one_stops_the_import() -> None:
    """The table is total; the answering kinds are those that end a park."""
    assert set(CLASSIFICATION) == set(Kind)
    assert TERMINAL | {"EXECUTION_RESUMED", "EXECUTION_SUSPENDED"} == ANSWERING
    source = Path(events.__file__).read_text(encoding="utf-8")
    missing = source.replace('    Kind.STEP_FAILED: "ignorable",\n', "")
    assert missing != source
    with pytest.raises(TypeError, match="STEP_FAILED"):
        exec(compile(missing, "events.py", "exec"), {"__name__": "broken"})  # noqa: S102


@pytest.mark.parametrize(
    ("kind", "is_kernel", "answers"),
    [
        ("EXECUTION_RESUMED", True, True),
        ("EXECUTION_SUSPENDED", True, True),
        ("EXECUTION_CONTINUED", True, True),
        ("EXECUTION_DENIED", True, False),
        ("STEP_FAILED", True, False),
        ("MESSAGE_CONSUMED", True, False),
        ("EXECUTION_MIGRATED", True, False),
        ("A_KIND_OF_A_NEWER_NODE", True, True),  # cannot be classified here: fail closed
        ("a delta of a sibling", False, False),  # an application event never answers
        ("EXECUTION_RESUMED", False, True),  # the name is the kernel's own, whatever the stamp
    ],
)
def test_classification_reads_the_kind_and_the_stamp(kind: str, is_kernel: bool, answers: bool) -> None:
    """The rules of ADR 0118, D1."""
    assert is_answering(kind, is_kernel) is answers


_TEXTS = st.text(st.characters(), max_size=8)  # NUL and lone surrogates too
_TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.from_regex("[a-z_]{1,12}", fullmatch=True),
        _TREES | values.map(Encoded.of) | values.map(lambda value: Encoded(codec.dumps(value))),
        max_size=6,
    ),
    st.sampled_from(Kind),
)
@example({"reason": "\ud83d\ude00", "principal": '\0\x7f\\u"'}, Kind.EXECUTION_CANCELLED)
@example({"on": WaitStatus.ANSWERED, "subject": ("shop.order", "1")}, Kind.EXECUTION_STARTED)
def test_what_a_writer_folds_of_its_fact_is_what_a_reader_gets(fields: dict[str, Any], kind: Kind) -> None:
    """The data of a fact in the making equal those of its stored text, type by type, and share nothing with it."""
    fact = Event.of("e1", 1, kind, fields, None, 1)
    row = Event("e1", 1, str(kind), fact.body, writer=1)
    assert fact == row
    assert fact.data == row.data
    assert json.dumps(fact.data) == json.dumps(row.data)
    assert _types(fact.data) == _types(json.loads(fact.body))
    before = json.dumps(row.data)
    for value in fields.values():
        if isinstance(value, dict | list):
            value.clear()
    assert json.dumps(fact.data) == before


def _types(tree: Any) -> Any:
    if isinstance(tree, dict):
        return [(type(key), key, _types(value)) for key, value in tree.items()]
    return [list, *map(_types, tree)] if isinstance(tree, list) else type(tree)


def test_a_log_has_no_gaps() -> None:
    """An event that does not follow the last one is refused."""
    state = fold(log(STARTED, STEP))
    with pytest.raises(ValueError, match="no gaps"):
        apply(state, log(STARTED, STEP, IN_DOUBT, PARK)[3])


def test_apply_leaves_the_given_state_as_it_was() -> None:
    """States are values."""
    facts = log(STARTED, STEP, IN_DOUBT, PARK)
    before = fold(facts[:2])
    after = apply(before, facts[2])
    assert before.frames["s"].status == FrameStatus.RUNNING
    assert after.frames["s"].status == FrameStatus.IN_DOUBT
    with pytest.raises(TypeError):
        before.frames["t"] = before.frames["s"]  # type: ignore[index]


def test_a_park_records_the_fence_under_which_it_was_written() -> None:
    """An answer conditions itself on that token; a park that was written unfenced has 0."""
    assert fold(log(STARTED, STEP, IN_DOUBT, PARK, fence=7)).park_fence == 7
    state = fold(log(STARTED, STEP, IN_DOUBT, PARK))
    assert (state.park_fence, state.park_sequence, state.reason) == (0, 4, "effect-indoubt")


@pytest.mark.parametrize(
    ("given_verdict", "status", "generation", "output"),
    [
        (verdict("completed-with-result", output={"tx": 1}), FrameStatus.COMPLETED, 0, {"tx": 1}),
        (verdict("retry-fresh"), FrameStatus.FRESH, 1, None),
        (verdict("fail", error={"type": "X", "message": "m"}), FrameStatus.FAILED, 0, None),
    ],
)
def test_verdicts_settle_the_frame(
    given_verdict: Any, status: FrameStatus, generation: int, output: Any
) -> None:
    """Three verdicts, three outcomes; the wait tells who gave it."""
    state = fold(log(STARTED, STEP, IN_DOUBT, PARK, given_verdict))
    frame = state.frames["s"]
    assert (frame.status, frame.generation, frame.output) == (status, generation, output)
    assert state.status == Status.RUNNING
    assert state.waits["in-doubt:s:1"].answered_by == "anna"
    assert state.in_doubt == ()


def test_a_second_answer_to_one_wait_changes_nothing_of_it() -> None:
    """The first answer stands, and a null resume only re-opens the status."""
    state = fold(
        log(STARTED, STEP, IN_DOUBT, PARK, verdict("completed-with-result", output=1), verdict("retry-fresh"))
    )
    assert state.frames["s"].output == 1
    assert state.waits["in-doubt:s:1"].status == WaitStatus.ANSWERED


def test_unknown_kinds_of_the_kernel_are_remembered_and_application_events_are_not() -> None:
    """A node that cannot fold a kind must be able to leave the execution alone."""
    facts = log(STARTED, ("mine", {"note": "emit#1", "value": 1}))
    unknown = Event("e1", 3, "SOMETHING_NEW", pack({"at": 1}), is_kernel=True)
    state = fold([*facts, unknown])
    assert state.unknown_kinds == ("SOMETHING_NEW",)
    assert state.noted == {"emit#1"}


def test_meters_sum_exactly() -> None:
    """Amounts are Decimals."""
    spent = [("RESOURCE_METERED", {"resource": "usd", "amount": {"$decimal": "0.1"}})] * 3
    assert fold(log(STARTED, *spent)).meters == {"usd": Decimal("0.3")}


FACTS = st.sampled_from(
    [
        STEP,
        ("STEP_COMPLETED", {"step": "s", "output": 1}),
        ("STEP_FAILED", {"step": "s", "error": {"type": "E", "message": "m"}}),
        ("STEP_RETRYING", {"step": "s", "error": {"type": "E"}, "next_at": 5, "fresh_key": True}),
        IN_DOUBT,
        PARK,
        ("EXECUTION_SUSPENDED", {"reason": "waiting", "waits": [{"id": "w", "on": "A", "wake_at": 9}]}),
        ("EXECUTION_RESUMED", {"wait": "w", "event": "A", "payload": 1}),
        ("TIMER_FIRED", {"wait": "w", "wake_at": 9}),
        verdict("retry-fresh"),
        ("MESSAGE_CONSUMED", {"wait": "m", "on": "__loom_message__", "name": "n", "number": 3, "payload": 1}),
        ("DECISION_RECORDED", {"decision": "d", "value": 1}),
        ("EXECUTION_DENIED", {"act": "cancel"}),
        ("EXECUTION_COMPLETED", {"result": 1}),
        ("mine", {"note": "emit#1"}),
    ]
)


@given(st.lists(FACTS, max_size=25))
def test_folding_step_by_step_equals_folding_at_once(facts: list[Any]) -> None:
    """apply, fold and the accumulator are one set of rules; projections of a state and a fold agree."""
    events = log(STARTED, STEP, *facts)
    accumulated = Fold()
    stepped = ExecutionState()
    for event in events:
        accumulated.apply(event)
        stepped = apply(stepped, event)
        assert accumulated.state() == stepped
        assert project(accumulated) == project(stepped)
    assert fold(events) == stepped
