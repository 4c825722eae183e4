"""Source files, each read and parsed once; what cannot be read has nothing to say."""

from __future__ import annotations

import ast
import linecache
import re
from dataclasses import dataclass
from types import FunctionType
from typing import Final, TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_SILENCED: Final = re.compile(r"#\s*loom:\s*ok\b(?P<rest>.*)")
_ID: Final = re.compile(r"\bW\d{3}\b")


@dataclass(frozen=True, slots=True)
class File:
    """A parsed file: its functions by name and first line, as their code objects know them."""

    name: str
    functions: dict[tuple[str, int], FunctionNode]
    silenced: dict[int, frozenset[str]]

    def is_silenced(self, rule_id: str, first: int, last: int) -> bool:
        """Tell whether one of these lines ends with ``# loom: ok``, alone or with that id."""
        found = [self.silenced[line] for line in range(first, last + 1) if line in self.silenced]
        return any(not ids or rule_id in ids for ids in found)


class Sources:
    """The files of one run of the checks."""

    def __init__(self) -> None:
        self._files: dict[str, File | None] = {}

    def find(self, function: FunctionType) -> tuple[File, FunctionNode] | None:
        """The file and the syntax of a function; None without a source that fits."""
        code = function.__code__
        if code.co_filename not in self._files:
            self._files[code.co_filename] = _parsed(code.co_filename)
        file = self._files[code.co_filename]
        node = file.functions.get((code.co_name, code.co_firstlineno)) if file is not None else None
        return (file, node) if file is not None and node is not None else None


def _parsed(filename: str) -> File | None:
    lines = linecache.getlines(filename)
    if not lines:
        return None
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions: dict[tuple[str, int], FunctionNode] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # A code object begins at the first decorator.
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions[node.name, first] = node
    silenced = {
        number: frozenset(_ID.findall(found["rest"]))
        for number, line in enumerate(lines, 1)
        if (found := _SILENCED.search(line))
    }
    return File(filename, functions, silenced)
