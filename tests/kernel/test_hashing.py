"""Hashes: moved by what the fold depends on, and by nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from loom_django import FlowContext, RetryPolicy, StepContext, definitions, flow, tool
from loom_django.errors import DefinitionError
from loom_django.kernel import structure
from loom_django.kernel.hashing import body_fingerprint, legacy_hash, structural_hash

pytestmark = pytest.mark.once

A: dict[str, Any] = {"id": "a", "tool": "a", "idempotent": True, "transactional": False, "fresh_key": False}
B: dict[str, Any] = {"id": "b", "tool": "b", "idempotent": None, "transactional": False, "fresh_key": False}


def test_the_order_of_steps_does_not_count() -> None:
    """Reordering steps= is cosmetic."""
    assert structural_hash([A, B], ["x", "y"]) == structural_hash([B, A], ["y", "x"])


@pytest.mark.parametrize(
    "changed",
    [
        [A],
        [{**A, "idempotent": False}, B],
        [{**A, "transactional": True}, B],
        [{**A, "fresh_key": True}, B],
        [{**A, "id": "c"}, B],
    ],
)
def test_what_the_fold_depends_on_counts(changed: list[Any]) -> None:
    """Steps, their declarations and durable policies move the hash."""
    assert structural_hash(changed, []) != structural_hash([A, B], [])


BODY = '''
@decorated
def order(ctx: FlowContext, n: int = 3) -> str:
    """What it does."""
    # a comment
    total = ctx.run(charge, n)
    def inner(x): return x
    return f"{total!r:>10}"
'''


def test_a_fingerprint_ignores_what_a_body_does_not_do() -> None:
    """Comments, formatting, docstrings, annotations, decorators and the name do not count."""
    same = """
def renamed(ctx, n=3):
    other: int
    total: int = ctx.run(
        charge,
        n,
    )

    def inner(x):
        "a docstring of its own"
        return x

    return f'{total!r:>10}'
"""
    assert body_fingerprint(BODY) == body_fingerprint(same)
    assert body_fingerprint(BODY) != body_fingerprint(BODY.replace("return x", "return -x"))
    assert body_fingerprint(BODY) != body_fingerprint(BODY.replace("n: int = 3", "n: int = 4"))


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    """No hash seed, no id, no path goes into it."""
    program = f"from loom_django.kernel.hashing import body_fingerprint; print(body_fingerprint({BODY!r}))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == body_fingerprint(BODY)


EVERY_SYNTAX = '''
@decorated
async def order(ctx: FlowContext, n: int = 3, /, *more: int, sep="x", **rest: str) -> str:
    """What it does."""
    total = ctx.run(charge, n)
    def inner(x): return x
    with opened(n) as one, opened(2) as two:
        pass
    try:
        [y async for y in seen() if (z := y)]
    except (ValueError, TypeError) as exc:
        raise LookupError from exc
    match total:
        case {"id": str(name), **others}:
            return lambda: -1.5e3 + 2j
        case [1, *_] | None:
            return u"é" if False else not ...
    return f"{total!r:>10} {n:{sep}}"
'''


def test_hashes_are_the_same_for_ever() -> None:
    """On every Python, in every process: recorded values are compared with what is computed here."""
    assert structural_hash([A, B], ["x"]) == (
        "sha256:e5f8a1eb257ed7c1c0ba51d7ee49a59d18a4b2f76f39e1acf13466c3c5899326"
    )
    assert legacy_hash([A, B], ["x"]) == "fnv1a:3253ca99"
    assert body_fingerprint(EVERY_SYNTAX) == (
        "sha256:0d55b26b93090cde58b707ac3af06492e5c6e732526f593a70b338dd3b8b3da8"
    )


@pytest.mark.parametrize(("text", "value"), [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968)])
def test_the_legacy_hash_is_fnv_1a(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    """By the published test vectors."""
    monkeypatch.setattr("loom_django.kernel.hashing._canonical", lambda *graph: text.encode())
    assert legacy_hash([], []) == f"fnv1a:{value:08x}"


def test_an_empty_text_counts_where_it_is_an_argument() -> None:
    """Only the one that Python 3.12 adds to a format spec does not."""
    assert body_fingerprint("def f(ctx): g('', 1)") != body_fingerprint("def f(ctx): g(1)")


def test_what_a_program_may_rename_does_not_count() -> None:
    """The flow's function, a tool's with a name=, the order of steps=, the version: the hash stays."""

    def declared(version: int, tools: list[Any]) -> str:
        def body(ctx: FlowContext) -> None:
            """Nothing."""

        body.__name__ = f"body{version}"
        made = flow("hash.cosmetic", version=version, steps=tools, step_families=["x"])(body)
        definitions.registry.forget("hash.cosmetic")
        return made.flow_hash

    def charge(ctx: StepContext) -> None:
        """Nothing."""

    def charge_card(ctx: StepContext, more: int = 3) -> None:
        """Renamed, and changed."""

    def ship(ctx: StepContext) -> None:
        """Nothing."""

    first, other = tool(charge), tool(ship)
    renamed = tool(name="charge", timeout=3, retry=RetryPolicy(max_attempts=7))(charge_card)
    assert declared(1, [first, other]) == declared(2, [other, renamed])


def test_an_outline_says_all_that_is_hashed() -> None:
    """So a recorded one can be compared step by step; a graph that is too big for it has none."""
    steps = [
        {"id": step_id, "tool": tool_id, "idempotent": idem, "transactional": trans, "fresh_key": fresh}
        for step_id, tool_id, idem, trans, fresh in [
            ("a", "a", True, False, True),
            ("b-rest", "b:c", False, False, False),
            ("c", "c", None, True, False),
        ]
    ]
    text = structure.outline(steps, ["/x.*/"])
    assert text is not None
    recorded = json.loads(text)
    assert structural_hash(structure.steps_of(recorded), recorded["families"]) == structural_hash(
        steps, ["/x.*/"]
    )
    assert structure.outline([{**steps[0], "id": "x" * structure.MAX_OUTLINE}], []) is None


def test_differences_are_told_step_by_step() -> None:
    """What is gone, what is new, what was declared anew; and how a renamed step keeps its id."""
    old = [{**A, "id": "charge", "tool": "charge"}, B, {**A, "id": "c", "tool": "c", "idempotent": False}]
    card = {**A, "id": "charge_card", "tool": "charge_card"}
    new = [card, {**B, "transactional": True}, {**A, "id": "d", "tool": "e"}]
    assert set(structure.differences(old, new, old_families=["x"], new_families=["y"])) == {
        "step 'charge' is gone, 'charge_card' is new: @tool(name='charge') keeps it if it was renamed",
        "step 'c' is gone",
        "step 'd' is new",
        "step 'b' had transactional=False, and has transactional=True now",
        "step family 'x' is gone",
        "step family 'y' is new",
    }
    assert structure.differences([A], [{**A, "tool": "z"}]) == ["step 'a' ran the tool 'a', and runs 'z' now"]
    assert structure.differences([A], [{**A, "id": "first"}]) == [
        "step 'a' is gone, 'first' is new: .named('a') keeps it if it was renamed"
    ]


def test_auto_reads_the_source_and_says_when_there_is_none() -> None:
    """A body without source needs a string."""

    @flow("hash.auto", code_fingerprint="auto")
    def body(ctx: FlowContext) -> None:
        return None

    assert body.code_hash.startswith("sha256:")
    definitions.registry.forget("hash.auto")
    made: dict[str, Any] = {}
    exec("def bare(ctx): return 1", made)  # noqa: S102
    with pytest.raises(DefinitionError, match="give a string"):
        flow("hash.bare", code_fingerprint="auto")(made["bare"])


def test_registering_the_same_content_is_quiet_and_other_content_is_an_error() -> None:
    """A reload is no conflict; a changed flow under the same version is."""

    @tool
    def step(ctx: StepContext) -> None:
        return None

    def body(ctx: FlowContext) -> None:
        return None

    flow("hash.same", steps=[step])(body)
    flow("hash.same", steps=[step])(body)
    with pytest.raises(DefinitionError, match="higher version"):
        flow("hash.same")(body)
    definitions.registry.forget("hash.same")


def _method_tool() -> Any:
    class Holder:
        @tool  # type: ignore[arg-type]
        def method(self, ctx: StepContext) -> None:
            return None

    return Holder


def _generator() -> Any:
    @tool
    def generate(ctx: StepContext) -> Any:
        yield 1

    return generate


def _without_context() -> Any:
    @tool  # type: ignore[arg-type]
    def bare() -> None:
        return None

    return bare


def _wrong_context() -> Any:
    @tool  # type: ignore[arg-type]
    def wrong(ctx: FlowContext) -> None:
        return None

    return wrong


async def _async(ctx: Any) -> None:
    return None


def _sync(ctx: Any) -> None:
    return None


@pytest.mark.parametrize(
    "declare",
    [
        _method_tool,
        _generator,
        _without_context,
        _wrong_context,
        lambda: tool(transactional=True)(_async),
        lambda: tool(transactional=True, idempotent=False)(_sync),
        lambda: tool(transactional=True, timeout=3)(_sync),
        lambda: tool(in_doubt_on=OSError)(_sync),
        lambda: tool(idempotent=False, retry=RetryPolicy())(_sync),
        lambda: tool(name="a#b")(_sync),
        lambda: flow("bad.version", version=0)(_sync),
        lambda: flow("bad.version", version=True)(_sync),
        lambda: flow("bad.steps", steps=[_sync])(_sync),  # type: ignore[list-item]
        lambda: flow("bad.keyed", steps=[tool(_sync).keyed("k")])(_sync),
        lambda: flow("bad.twice", steps=[tool(_sync), tool(_sync)])(_sync),
        lambda: flow("bad.durability", durability="never")(_sync),  # type: ignore[arg-type]
        lambda: flow("bad.error", on_error="ignore")(_sync),  # type: ignore[arg-type]
        lambda: flow("bad.deadline", deadline=-1)(_sync),
        lambda: flow("")(_sync),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_where_it_stands(declare: Any) -> None:
    """Each with a LoomError that says what to write instead."""
    from loom_django.errors import LoomError

    with pytest.raises(LoomError) as refused:
        declare()
    assert len(str(refused.value)) > 20
