"""Hashes: moved by what the fold depends on, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from loom_django import FlowContext, RetryPolicy, StepContext, definitions, flow, tool
from loom_django.errors import DefinitionError
from loom_django.kernel.hashing import body_fingerprint, structural_hash

pytestmark = pytest.mark.once

A = {"id": "a", "tool": "a", "idempotent": True, "transactional": False, "fresh_key": False}
B = {"id": "b", "tool": "b", "idempotent": None, "transactional": False, "fresh_key": False}


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
    total = ctx.run(
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
