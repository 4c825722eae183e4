"""What a name in a function stands for, found as Python finds it: its own names, its closure, its globals.

Nothing is called and no attribute of an object is fetched but those of modules, from their dictionaries: lazy
objects stay as they are. A name that may stand for several things stands for nothing here.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from loom_django.errors import class_name
from loom_django.lint.rules import CONVERTS_ITS_ARGUMENT
from loom_django.lint.sources import FunctionNode

UNKNOWN: Final = object()
CONTEXT: Final = object()

_DEPTH: Final = 8  # of names that stand for names


@dataclass(frozen=True, slots=True)
class Meaning:
    """An object, where it is known, and the dotted paths by which rules may know it.

    ``value`` is UNKNOWN, CONTEXT for a flow's ctx, a syntax node for a function inside the body, or the object.
    What a body makes by calling a class has the paths of that class, and the class as ``made_by``.
    """

    paths: frozenset[str] = frozenset()
    value: Any = UNKNOWN
    made_by: type | None = None

    def attribute(self, name: str) -> Meaning:
        paths = frozenset(f"{path}.{name}" for path in self.paths)
        if is_a(self.value, ModuleType):
            value = vars(self.value).get(name, UNKNOWN)
            return Meaning(paths | _paths_of(value), value)
        return Meaning(paths)

    def called(self) -> Meaning:
        if is_a(self.value, FunctionType, BuiltinFunctionType, MethodType):
            return NOTHING
        return Meaning(self.paths, made_by=self.value if is_a(self.value, type) else None)


NOTHING: Final = Meaning()


def is_a(value: Any, *kinds: type) -> bool:
    """isinstance() that does not set up a lazy object by asking for its ``__class__``."""
    return issubclass(type(value), kinds)


def _paths_of(value: Any) -> frozenset[str]:
    if value is UNKNOWN:
        return frozenset()
    if is_a(value, ModuleType):
        return frozenset({value.__name__})
    if is_a(value, type):
        return _public(value.__module__, value.__qualname__, value)
    if is_a(value, FunctionType):
        return _public(value.__module__, value.__qualname__, value)
    if is_a(value, BuiltinFunctionType, MethodType):
        owner = value.__self__
        if owner is None or is_a(owner, ModuleType):
            return _public(value.__module__, value.__qualname__, value)
        cls = owner if is_a(owner, type) else type(owner)
        return frozenset({f"{class_name(cls)}.{value.__name__}"})
    return frozenset({class_name(type(value))})


def _public(module: Any, name: str, value: Any) -> frozenset[str]:
    """The path where it is defined, and those of the packages around that offer it too: asyncio.gather."""
    parts = str(module).split(".")
    around = (".".join(parts[:length]) for length in range(1, len(parts)))
    offers = (package for package in around if _loaded(f"{package}.{name}") is value)
    return frozenset({f"{module}.{name}", *(f"{package}.{name}" for package in offers)})


@dataclass(frozen=True, slots=True)
class _Import:
    path: str


class Scope:
    """The names of one function of a body; `function` is the real one around them all."""

    def __init__(
        self, node: FunctionNode, function: FunctionType, outer: Scope | None, context: str | None
    ) -> None:
        self.function = function
        self.outer = outer
        self.context = context
        self.bindings = _bindings(node, function)

    def binding(self, name: str) -> tuple[Scope, Any] | None:
        """The scope in the body that binds a name, and the one thing that it binds it to, else None."""
        if name in self.bindings:
            found = self.bindings[name]
            return self, found[0] if len(found) == 1 else None
        return self.outer.binding(name) if self.outer is not None else None

    def meaning(self, node: ast.AST | None, depth: int = _DEPTH) -> Meaning:
        """What an expression stands for; NOTHING if that cannot be told."""
        if depth == 0:
            return NOTHING
        match node:
            case ast.Name(id=name):
                found = self.binding(name)
                if found is None:
                    value = _outside(self.function, name)
                    return Meaning(_paths_of(value), value)
                scope, bound = found
                return scope._bound(name, bound, depth - 1)
            case ast.Attribute(value=owner, attr=attr):
                return self.meaning(owner, depth).attribute(attr)
            case ast.Call(func=func, args=args, keywords=keywords):
                base = self.meaning(func, depth)
                seeded = (args or keywords) and base.paths & CONVERTS_ITS_ARGUMENT
                return NOTHING if seeded else base.called()
            case ast.Lambda() | ast.FunctionDef() | ast.AsyncFunctionDef():
                return Meaning(value=node)
        return NOTHING

    def _bound(self, name: str, bound: Any, depth: int) -> Meaning:
        if isinstance(bound, ast.arg):
            return Meaning(value=CONTEXT) if name == self.context else NOTHING
        if isinstance(bound, _Import):
            value = _loaded(bound.path)
            return Meaning(_paths_of(value) | {bound.path}, value)
        return self.meaning(bound, depth)


def own(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes below, but nothing inside of functions and classes among them."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def parameters(node: FunctionNode) -> list[ast.arg]:
    args = node.args
    others = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *others]


def _bindings(function: FunctionNode, real: FunctionType) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for arg in parameters(function):
        found[arg.arg].append(arg)
    assigned: dict[ast.AST, ast.AST] = {}
    elsewhere: set[str] = set()
    nodes = list(own([function.body] if isinstance(function, ast.Lambda) else function.body))
    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name() as target], value=value)
                | ast.AnnAssign(target=ast.Name() as target, value=ast.AST() as value)
                | ast.NamedExpr(target=target, value=value)
            ):
                assigned[target] = value
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found[name].append(assigned.get(node))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name].append(node)
            case (
                ast.ClassDef(name=str() as name)
                | ast.ExceptHandler(name=str() as name)
                | ast.MatchAs(name=str() as name)
                | ast.MatchStar(name=str() as name)
                | ast.MatchMapping(rest=str() as name)
            ):
                found[name].append(None)
            case ast.Import() | ast.ImportFrom():
                for name, imported in _imports(node, real):
                    found[name].append(imported)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                elsewhere.update(names)
    return {name: bound for name, bound in found.items() if name not in elsewhere}


def _imports(node: ast.Import | ast.ImportFrom, real: FunctionType) -> Iterator[tuple[str, _Import | None]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, _Import(alias.name if alias.asname else top)
        return
    module = "." * node.level + (node.module or "")
    try:
        module = importlib.util.resolve_name(module, real.__globals__.get("__package__") or "")
    except ImportError:
        module = ""
    for alias in node.names:
        yield alias.asname or alias.name, _Import(f"{module}.{alias.name}") if module else None


def _loaded(path: str) -> Any:
    """What a path names, if its module is loaded already."""
    if path in sys.modules:
        return sys.modules[path]
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), "__dict__", {}).get(name, UNKNOWN)


def _outside(function: FunctionType, name: str) -> Any:
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if free == name:
            try:
                return cell.cell_contents
            except ValueError:  # not filled yet
                return UNKNOWN
    if name in function.__globals__:
        return function.__globals__[name]
    return vars(builtins).get(name, UNKNOWN)
