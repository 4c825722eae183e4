"""The traps in one flow's body: its function, the functions in it, and those outside that are given its ctx.

A false alarm costs more than a miss: what cannot be resolved for certain is passed over.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

from loom_django.definitions import Flow, Tool
from loom_django.errors import class_name
from loom_django.lint import rules
from loom_django.lint.names import CONTEXT, Meaning, Scope, is_a, own, parameters
from loom_django.lint.rules import Rule, rule_for
from loom_django.lint.sources import File, FunctionNode, Sources

# What may leave the body to come back later, and what else may leave it for good.
_SLEEPS: Final = frozenset({"sleep", "sleep_until"})
_WAITS: Final = frozenset({"suspend", "receive", "await_child", "await_children"})
_PARKS: Final = _SLEEPS | _WAITS | {"run", "run_step", "parallel", "agent_loop"}
_LEAVES: Final = _PARKS | {"decide", "start_child", "on_failure", "emit", "meter"}

_CONTEXTS: Final = ("FlowContext", "AsyncFlowContext")
_ROW_METHODS: Final = frozenset(
    {"save", "asave", "delete", "adelete", "refresh_from_db", "arefresh_from_db", "full_clean"}
)
_SHOWN: Final = 80  # characters of code in a message


@dataclass(frozen=True, slots=True)
class Finding:
    """One trap in one line: the rule's id without its prefix, and what to say."""

    id: str
    message: str
    hint: str
    filename: str
    line: int


def findings_in(flow: Flow[..., Any], sources: Sources) -> list[Finding]:
    """The traps in a flow's body, by place; none where a source cannot be read."""
    found: dict[tuple[str, str, int], Finding] = {}
    todo: list[tuple[Any, bool]] = [(flow.func, False)]
    done: set[tuple[FunctionType, bool]] = set()
    while todo:
        func, decides = todo.pop()
        function = _plain(func)
        source = sources.find(function) if function is not None else None
        if function is None or source is None or (function, decides) in done:
            continue
        if func is not flow.func and _context_parameter(source[1]) is None:
            continue
        done.add((function, decides))
        body = _Body(flow, function, source[0])
        for finding in body.findings(source[1], decides):
            found.setdefault((finding.filename, finding.id, finding.line), finding)
        todo += body.handed_on
    return sorted(found.values(), key=lambda finding: (finding.filename, finding.line, finding.id))


def _plain(func: Any) -> FunctionType | None:
    if not is_a(func, FunctionType):
        return None
    try:
        inner = inspect.unwrap(func)
    except ValueError:  # it wraps itself
        return None
    return inner if isinstance(inner, FunctionType) else None


def _context_parameter(node: FunctionNode) -> str | None:
    """The parameter that is a flow's ctx by its name or its annotation."""
    for arg in parameters(node):
        annotation = ast.unparse(arg.annotation).strip("'\"") if arg.annotation else ""
        if arg.arg == "ctx" or annotation.rpartition(".")[2] in _CONTEXTS:
            return arg.arg
    return None


class _Body(ast.NodeVisitor):
    """One function of a body and the functions inside it."""

    def __init__(self, flow: Flow[..., Any], function: FunctionType, file: File) -> None:
        self.flow = flow
        self.function = function
        self.file = file
        self.handed_on: list[tuple[Any, bool]] = []  # functions outside that get a ctx; whether they decide
        self.found: list[Finding] = []
        self.exempt: frozenset[str] = frozenset()
        self.inner: list[tuple[FunctionNode, Scope, frozenset[str]]] = []
        self.branches: set[ast.AST] = set()
        self.deciders: set[ast.AST] = set()

    def findings(self, node: FunctionNode, decides: bool) -> list[Finding]:
        self.exempt = rules.FREE_IN_DECIDER if decides else frozenset()
        context = _context_parameter(node)
        if context is None and self.function is _plain(self.flow.func):
            context = next((arg.arg for arg in parameters(node)), None)
        self._enter(node, None, context)
        # Only when a function was read whole is it known what the functions inside it are for.
        while self.inner:
            inside, outer, exempt = self.inner.pop()
            given = inside in self.branches or inside in self.deciders
            context = _context_parameter(inside)
            if context is None and given:
                context = next((arg.arg for arg in inside.args.args[:1]), None)
            self.exempt = exempt | (rules.FREE_IN_DECIDER if inside in self.deciders else frozenset())
            self._enter(inside, outer, context)
        return self.found

    def _enter(self, node: FunctionNode, outer: Scope | None, context: str | None) -> None:
        self.scope = Scope(node, self.function, outer, context)
        for child in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(child)

    def _report(self, rule: Rule, text: str, line: int, first: int, last: int) -> None:
        """Tell it at a line, if none of the lines from the first to the last silences it."""
        if rule.id in self.exempt or self.file.is_silenced(rule.id, first, last):
            return
        shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        message = f'The body of the flow "{self.flow.id}" has `{shown}`: {rule.why}.'
        self.found.append(Finding(rule.id, message, rule.hint, self.file.name, line))

    def _report_code(self, rule: Rule, node: ast.expr) -> None:
        self._report(rule, ast.unparse(node), node.lineno, node.lineno, node.end_lineno or node.lineno)

    # Functions and classes inside.

    def _later(self, node: FunctionNode) -> None:
        self.inner.append((node, self.scope, self.exempt))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if not node.decorator_list:  # what a decorator makes of it, a tool perhaps, cannot be known
            self._later(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._later(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        pass

    # Calls.

    def visit_Call(self, node: ast.Call) -> None:
        name = self._context_call(node)
        if name is not None:
            self._visit_context_call(node, name)
            return
        self._check_call(node)
        self._follow(node)
        self.generic_visit(node)

    def _context_call(self, node: ast.AST) -> str | None:
        """The method's name, if the node is a call of the ctx."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        return node.func.attr if self.scope.meaning(node.func.value).value is CONTEXT else None

    def _visit_context_call(self, node: ast.Call, name: str) -> None:
        first = node.args[0] if node.args else None
        if name in ("run", "on_failure") and first is not None:
            self._check_step(first)
        elif name == "run_step" and isinstance(first, ast.Constant) and isinstance(first.value, str):
            if not {first.value, first.value.split("#", 1)[0]} & self.flow.steps.keys():
                self._report_code(rules.UNDECLARED, node)
        elif name == "agent_loop":
            self._check_agent(node)
        elif name == "parallel":
            self._note_functions(node, self.branches, decides=False)
        elif name == "decide":
            self._note_functions(node, self.deciders, decides=True)
        before = self.exempt
        for child in ast.iter_child_nodes(node):
            is_timeout = isinstance(child, ast.keyword) and child.arg == "timeout"
            if name in _SLEEPS or (name in _WAITS and is_timeout):
                self.exempt = before | {rules.WORLD.id}  # the log keeps how long a wait is
            self.visit(child)
            self.exempt = before

    def _check_agent(self, node: ast.Call) -> None:
        """The model and the tools of an agent loop are steps like others."""
        for keyword in node.keywords:
            if keyword.arg not in ("model", "tools"):
                continue
            named = keyword.value.elts if isinstance(keyword.value, ast.List | ast.Tuple) else [keyword.value]
            for part in named:
                if (tool := self._tool_of(part)) is not None:
                    self._check_declared(tool, part)

    def _note_functions(self, node: ast.Call, role: set[ast.AST], *, decides: bool) -> None:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        for part in own(self._spelled_out(given)):
            value = self.scope.meaning(part).value
            if _is_inside(value):
                role.add(value)
                if decides:
                    self._note_callees(value)
            elif is_a(value, FunctionType):
                self.handed_on.append((value, decides))

    def _note_callees(self, decider: ast.AST) -> None:
        """The body's other functions that a decider calls are a part of it."""
        for part in ast.walk(decider):
            value = self.scope.meaning(part).value
            if isinstance(part, ast.Name) and _is_inside(value) and value not in self.deciders:
                self.deciders.add(value)
                self._note_callees(value)

    def _spelled_out(self, given: Iterable[ast.expr]) -> Iterator[ast.expr]:
        """The arguments, and for a variable what it was set to."""
        for argument in given:
            yield argument
            bound = self.scope.binding(argument.id) if isinstance(argument, ast.Name) else None
            if bound is not None and isinstance(bound[1], ast.expr):
                yield bound[1]

    def _follow(self, node: ast.Call) -> None:
        """A function outside that is called with the ctx is a part of the body."""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        called = self.scope.meaning(node.func).value
        if is_a(called, FunctionType) and any(self.scope.meaning(one).value is CONTEXT for one in arguments):
            self.handed_on.append((called, self.exempt >= rules.FREE_IN_DECIDER))

    def _check_call(self, node: ast.Call) -> None:
        called = self.scope.meaning(node.func)
        if is_a(called.value, Tool, Flow):
            self._report_code(rules.DIRECT, node)
        elif isinstance(node.func, ast.Attribute):
            self._check_method(node, node.func)
        if "builtins.getattr" in called.paths and node.args:
            self._check_read(node, self.scope.meaning(node.args[0]))
        rule = rule_for(called.paths, rules.CALLS)
        converts = (node.args or node.keywords) and called.paths & rules.CONVERTS_ITS_ARGUMENT
        if rule is not None and not converts:
            self._report_code(rule, node)

    def _check_method(self, node: ast.Call, method: ast.Attribute) -> None:
        if method.attr == "bind":
            tool = self._tool_of(method.value)
            if tool is not None:
                self._check_declared(tool, method.value)
        elif method.attr in _ROW_METHODS and _is_model(self.scope.meaning(method.value).made_by):
            self._report_code(rules.WORLD, node)

    # Steps.

    def _check_step(self, node: ast.expr) -> None:
        tool = self._tool_of(node)
        if tool is not None:
            self._check_declared(tool, node)
            return
        meaning = self.scope.meaning(node)
        inside = _is_inside(meaning.value) and not getattr(meaning.value, "decorator_list", ())
        partial = "functools.partial" in meaning.paths
        if inside or partial or is_a(meaning.value, FunctionType, BuiltinFunctionType):
            self._report_code(rules.NO_TOOL, node)
        elif is_a(meaning.value, Flow):
            self._report_code(rules.DIRECT, node)

    def _tool_of(self, node: ast.expr) -> Tool[..., Any] | None:
        """The tool that an expression names, under its own id: ``ship``, ``ship.named("x").keyed(sku)``."""
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="keyed")):
                tool = self._tool_of(owner)
                return None if tool is None else tool.keyed(1)
            case ast.Call(
                func=ast.Attribute(value=owner, attr="named"), args=[ast.Constant(value=str() as id_)]
            ):
                tool = self._tool_of(owner)
                return None if tool is None else tool.named(id_)
            case ast.Name() | ast.Attribute():
                value = self.scope.meaning(node).value
                return value if is_a(value, Tool) else None
        return None

    def _check_declared(self, tool: Tool[..., Any], node: ast.expr) -> None:
        listed = tool.step_id is None and self.flow.step_ids_of(tool)
        if not listed and not self._knows(tool.declared_id):
            self._report_code(rules.UNDECLARED, node)

    def _knows(self, step_id: str) -> bool:
        """Tell whether the flow may run a step of that id; a regular expression may admit any."""
        patterns = any(family.startswith("/") for family in self.flow.step_families)
        return patterns or self.flow.in_family(step_id)

    # What is read without a call.

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self.scope.meaning(node.value)
        self._check_read(node, owner)
        if _is_manager(owner.value, node.attr):
            self._report_code(rules.WORLD, node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._check_read(node, self.scope.meaning(node.value))
        self.generic_visit(node)

    def _check_read(self, node: ast.expr, owner: Meaning) -> None:
        rule = rule_for(owner.paths, rules.READS)
        if rule is not None:
            self._report_code(rule, node)

    # Blocks around a wait.

    def _asks(self, nodes: Iterable[ast.AST], calls: frozenset[str]) -> bool:
        return any(self._context_call(node) in calls for node in own(nodes))

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        inside: list[ast.stmt | ast.ExceptHandler] = [*node.body, *node.handlers, *node.orelse]
        if _does_something(node.finalbody) and self._asks(inside, _PARKS):
            # The keyword stands somewhere between; it has no place in the tree.
            last = inside[-1].end_lineno or node.lineno
            line = node.finalbody[0].lineno
            self._report(rules.AT_EACH_PARK, "finally:", line, last + 1, line)
        for handler in node.handlers:
            if self._catches_all(handler.type) and self._asks(node.body, _LEAVES):
                self._check_handler(handler, self._asks(node.body, _PARKS))
        self.generic_visit(node)

    visit_TryStar = visit_Try

    def _catches_all(self, caught: ast.expr | None) -> bool:
        if caught is None:
            return True
        types = caught.elts if isinstance(caught, ast.Tuple) else [caught]
        return any(self.scope.meaning(type_).value is BaseException for type_ in types)

    def _check_handler(self, handler: ast.ExceptHandler, parks: bool) -> None:
        text = "except:" if handler.type is None else f"except {ast.unparse(handler.type)}:"
        last = handler.body[-1]
        if not (isinstance(last, ast.Raise) and last.exc is None):
            self._report(rules.SWALLOWS, text, handler.lineno, handler.lineno, handler.lineno)
        elif parks and _does_something(handler.body[:-1]):
            self._report(rules.AT_EACH_PARK, text, handler.lineno, handler.lineno, handler.lineno)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        if self._asks(node.body, _PARKS):
            for item in node.items:
                self._check_manager(item.context_expr, node)
        self.generic_visit(node)

    visit_AsyncWith = visit_With

    def _check_manager(self, manager: ast.expr, node: ast.With | ast.AsyncWith) -> None:
        paths = self.scope.meaning(manager.func if isinstance(manager, ast.Call) else manager).paths
        if "contextlib.suppress" in paths and isinstance(manager, ast.Call):
            if any(self._catches_all(caught) for caught in manager.args):
                self._report_code(rules.SWALLOWS, manager)
        # One that is wrong for another reason is told once.
        elif not paths & rules.HARMLESS_MANAGERS and rule_for(paths, rules.CALLS) is not rules.CONCURRENT:
            last = manager.end_lineno or node.lineno
            self._report(rules.AT_EACH_PARK, f"with {ast.unparse(manager)}:", node.lineno, node.lineno, last)

    # Sets.

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        if self._is_set(node.iter) and self._asks(node.body, _LEAVES):
            text = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
            last = node.iter.end_lineno or node.lineno
            self._report(rules.UNORDERED, text, node.lineno, node.lineno, last)
        self.generic_visit(node)

    visit_AsyncFor = visit_For

    def _visit_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        sets = [part.iter for part in node.generators if self._is_set(part.iter)]
        # What makes the set is done once, before.
        again = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.comprehension)]
        for part in node.generators:
            again += [*part.ifs, *([] if part.iter in sets else [part.iter])]
        if sets and self._asks(again, _LEAVES):
            self._report_code(rules.UNORDERED, node)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def _is_set(self, node: ast.expr, depth: int = 4) -> bool:
        if depth == 0:
            return False
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor(), right=right):
                return self._is_set(left, depth - 1) or self._is_set(right, depth - 1)
            case ast.Call(func=func):
                paths = self.scope.meaning(func).paths
                if paths & {"builtins.set", "builtins.frozenset"}:
                    return True
                in_its_order = paths & {"builtins.list", "builtins.tuple", "builtins.enumerate"}
                return bool(in_its_order and node.args) and self._is_set(node.args[0], depth - 1)
            case ast.Name(id=name):
                found = self.scope.binding(name)
                if found is not None and isinstance(found[1], ast.arg):
                    return _annotated_as_set(found[1])
                if found is not None:
                    return isinstance(found[1], ast.expr) and self._is_set(found[1], depth - 1)
        return is_a(self.scope.meaning(node).value, set, frozenset)


def _is_inside(value: Any) -> bool:
    """Tell whether it is the syntax of a function inside the body."""
    return is_a(value, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)


def _annotated_as_set(arg: ast.arg) -> bool:
    annotation = arg.annotation.value if isinstance(arg.annotation, ast.Subscript) else arg.annotation
    return isinstance(annotation, ast.Name) and annotation.id in ("set", "frozenset")


def _does_something(nodes: Iterable[ast.AST]) -> bool:
    """Tell whether code reaches beyond the body's own variables."""
    return any(isinstance(node, ast.Call | ast.Await) for node in own(nodes))


def _is_model(cls: type | None) -> bool:
    return cls is not None and any(class_name(base) == "django.db.models.base.Model" for base in cls.__mro__)


def _is_manager(value: Any, name: str) -> bool:
    if not is_a(value, type) or not _is_model(value):
        return False
    return name in ("_default_manager", "_base_manager") or name in value._meta.managers_map
