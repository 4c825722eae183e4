"""What an execution remembers of the code it was started under.

``structural_hash`` covers what the fold depends on: the ids of the declared steps, the tools bound to them,
their idempotency and transaction declarations, whether a retry takes a fresh key, and the step families. The
order of ``steps=``, names of functions, formatting and the flow's version are no part of it. ``legacy_hash`` is a
32-bit one of the same text: logs that recorded it are compared by it, and nothing new is.
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
LEGACY_PREFIX = "fnv1a:"

# Positions, annotations and decorators do not change what a body does; empty fields are written by some
# Python versions and left out by others.
_IGNORED_FIELDS = frozenset(
    {"decorator_list", "returns", "annotation", "type_comment", "type_params", "kind"}
)


def structural_hash(steps: Iterable[Mapping[str, Any]], families: Iterable[str]) -> str:
    """Return ``sha256:<hex>`` over the declared graph; the order in which it is given does not matter."""
    return PREFIX + hashlib.sha256(_canonical(steps, families)).hexdigest()


def legacy_hash(steps: Iterable[Mapping[str, Any]], families: Iterable[str]) -> str:
    """Return ``fnv1a:<8 hex digits>``, the 32-bit FNV-1a of what :func:`structural_hash` covers."""
    value = 0x811C9DC5
    for byte in _canonical(steps, families):
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{LEGACY_PREFIX}{value:08x}"


def _canonical(steps: Iterable[Mapping[str, Any]], families: Iterable[str]) -> bytes:
    graph = {"families": sorted(families), "steps": sorted((dict(step) for step in steps), key=_by_id)}
    return json.dumps(graph, sort_keys=True, separators=(",", ":")).encode()


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
    parts = [_dump(function.args), *(_dump(statement) for statement in _what_runs(function.body))]
    return PREFIX + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _dump(node: Any) -> str:
    if isinstance(node, ast.JoinedStr):  # Python 3.12 ends a format spec in an empty text; others do not
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_dump(value)}"
            for name, value in ast.iter_fields(node)
            if name not in _IGNORED_FIELDS and value not in (None, [])
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return "[" + ",".join(_dump(item) for item in _what_runs(node)) + "]"
    return repr(node)


def _what_runs(body: list[Any]) -> list[Any]:
    return [item for item in body if not (_is_docstring(item) or _is_mere_annotation(item))]


def _is_docstring(item: Any) -> bool:
    return (
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    )


def _is_mere_annotation(item: Any) -> bool:
    return isinstance(item, ast.AnnAssign) and item.value is None and isinstance(item.target, ast.Name)
