"""What an execution remembers of the code it was started under.

``structural_hash`` covers what the fold depends on: the ids of the declared steps, the tools bound to them,
their idempotency and transaction declarations, whether a retry takes a fresh key, and the step families. The
order of ``steps=``, names of functions, formatting and the flow's version are no part of it.
``body_fingerprint`` covers a body's syntax tree, in a form that is equal on every supported Python.
"""

from __future__ import annotations

import ast
import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

PREFIX = "sha256:"

# Positions, annotations and decorators do not change what a body does; empty fields are written by some
# Python versions and left out by others.
_IGNORED_FIELDS = frozenset(
    {"decorator_list", "returns", "annotation", "type_comment", "type_params", "kind"}
)


def structural_hash(steps: Iterable[Mapping[str, Any]], families: Iterable[str]) -> str:
    """Return ``sha256:<hex>`` over the declared graph; the order in which it is given does not matter."""
    graph = {"families": sorted(families), "steps": sorted((dict(step) for step in steps), key=_by_id)}
    text = json.dumps(graph, sort_keys=True, separators=(",", ":"))
    return PREFIX + hashlib.sha256(text.encode()).hexdigest()


def _by_id(step: Mapping[str, Any]) -> str:
    return str(step["id"])


def body_fingerprint(source: str) -> str:
    """Return ``sha256:<hex>`` over the statements of the one function in ``source``.

    Comments, formatting, docstrings, annotations and the function's own name do not count.

    Raises:
        SyntaxError: the text is not a function that this Python can parse.
    """
    function = ast.parse(textwrap.dedent(source)).body[0]
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        raise SyntaxError("a function was expected")
    parts = [_dump(function.args), *(_dump(statement) for statement in _without_docstring(function.body))]
    return PREFIX + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _dump(node: Any) -> str:
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_dump(value)}"
            for name, value in ast.iter_fields(node)
            if name not in _IGNORED_FIELDS and value not in (None, [])
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        statements = _without_docstring(node)
        return "[" + ",".join(_dump(item) for item in statements) + "]"
    return repr(node)


def _without_docstring(body: list[Any]) -> list[Any]:
    return [
        item
        for item in body
        if not (
            isinstance(item, ast.Expr)
            and isinstance(item.value, ast.Constant)
            and isinstance(item.value.value, str)
        )
    ]
