"""A snapshot: the state it was made of, for the code that made it, of the log that it stands in."""

from __future__ import annotations

import ast
import copy
import inspect
import types
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom_django.kernel import snapshot
from loom_django.kernel.events import parse
from loom_django.kernel.fold import Fold, fold
from loom_django.kernel.snapshot import FORMAT, MODULES, KeptFrame, format_of, read, seal, write
from loom_django.kernel.state import ExecutionState, Frame
from tests.kernel.test_fold import FACTS, STARTED, STEP, log

pytestmark = pytest.mark.once

MORE = st.sampled_from(
    [
        ("EXECUTION_STARTED", {"flow": "f", "version": 2, "options": {"children": ["c"], "link": 2}}),
        (
            "STEP_STARTED",
            {"step": "t", "tool": "t", "scope": "1.left", "loop": "l", "content": "x", "args": {}},
        ),
        ("EFFECT_RETURNED_LATE", {"step": "s", "attempt": 1, "output": {"$tuple": [1, 2.5, None]}}),
        ("RESOURCE_METERED", {"resource": "usd", "amount": {"$decimal": "0.10"}, "step": "t", "note": "m#1"}),
        ("DECISION_RECORDED", {"decision": "e", "value": "ü", "inner_steps": ["s", "t"], "inner_since": 2}),
        ("CHILD_STARTED", {"child": "c", "note": "child#1", "on_parent_close": "abandon"}),
        (
            "EXECUTION_SUSPENDED",
            {"reason": "w", "waits": [{"id": "v", "on": "CHILD_DONE", "children": ["c"]}]},
        ),
        ("EXECUTION_MIGRATED", {"to_flow": "g", "to_version": 3, "to_graph": {"steps": {"s": ""}}}),
        ("EXECUTION_FAILED", {"error": {"type": "E", "bases": ["B"], "message": "\0\ud800"}}),
        ("OUTCOME_RECORDED", {"step": "s"}),
    ]
)


def typed(state: ExecutionState) -> str:
    """A state with the types of all that it holds; sets have no order."""
    return repr(replace(Fold(state).state(), messages=frozenset(), noted=frozenset()))


@given(st.lists(FACTS | MORE, max_size=25))
def test_a_snapshot_and_the_tail_are_the_log(facts: list[Any]) -> None:
    """Wherever it is taken, the state that comes of it is that of the whole log, as what it is and as text."""
    events = log(STARTED, STEP, *facts)
    whole = fold(events)
    for place in range(len(events) + 1):
        before = Fold(fold(events[:place]))
        after = Fold(read(write(before)))
        assert after.state() == before.state()
        for event in events[place:]:
            after.apply(event)
        assert after.state() == whole
        assert typed(after.state()) == typed(whole)
        assert (after.open_waits, after.doubtful) == (Fold(whole).open_waits, Fold(whole).doubtful)


def test_its_format_is_that_of_all_the_code_that_makes_a_state() -> None:
    """What the fold imports of the kernel is part of the digest, and so is each line of it."""
    names = {module.__name__ for module in MODULES}
    for module in (*MODULES, snapshot):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("loom_django.kernel.")
            ):
                # What codec says of a refused value, and what a state holds of failures, is in no state.
                assert node.module in names | {"loom_django.kernel.advice"}, node.module
    assert format_of((*MODULES, snapshot)) == FORMAT
    for module in (*MODULES, snapshot):
        others = [other for other in (*MODULES, snapshot) if other is not module]
        assert format_of(others) != FORMAT


def test_code_without_its_source_has_no_format() -> None:
    """Then nobody could say that it is the same, so there are no snapshots."""
    assert format_of([types.ModuleType("bytecode_only")]) == ""


def test_a_seal_is_of_one_execution_one_format_one_event_and_one_text() -> None:
    """Whatever is replaced, it is another one."""
    (*_, newest) = log(STARTED, STEP, fence=3)
    text = write(Fold(fold(log(STARTED, STEP))))
    mark = seal("e1", FORMAT, newest, text)
    assert mark == seal("e1", FORMAT, replace(newest), text)
    others = [
        seal("e2", FORMAT, newest, text),
        seal("e1", "another", newest, text),
        seal("e1", FORMAT, newest, text.replace('"s"', '"t"')),
        *(
            seal("e1", FORMAT, replace(newest, **change), text)
            for change in (
                {"sequence": 3}, {"kind": "STEP_FAILED"}, {"body": "{}"}, {"fence": None}, {"writer": 7},
                {"is_kernel": False},
            )
        ),
    ]  # fmt: skip
    assert len({mark, *others}) == 1 + len(others)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"status": "DANCING"}', "\0"])
def test_what_is_no_snapshot_is_refused(text: str) -> None:
    """By the errors that its reader takes for that."""
    with pytest.raises((ValueError, TypeError, LookupError)):
        read(text)
    assert parse(write(Fold()))["frames"] == []


def test_a_frame_out_of_a_snapshot_is_as_any_other() -> None:
    """Its arguments are read when somebody looks: nobody else can tell."""
    state = fold(log(STARTED, ("STEP_STARTED", {"step": "s", "tool": "s", "args": {"args": [1]}})))
    (frame,), (kept,) = state.frames.values(), read(write(Fold(state))).frames.values()
    assert type(kept) is KeptFrame
    assert kept.args == {"args": [1]}
    assert (kept != frame) is False
    assert kept != frame._replace(args=None)
    for copied in (kept._replace(), copy.copy(kept)):
        assert (type(copied), copied) == (Frame, frame)
    assert read(write(Fold(read(write(Fold(state)))))) == state
