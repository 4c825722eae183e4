"""What a program declares: tools, flows, and the registry that finds them again.

A tool or a flow is a value, not a function to call: calling one directly would run its effect unrecorded, so
that raises :class:`~loom_django.errors.DirectCallError`. Declarations are checked when they are made; whatever
can be refused at import is refused there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    overload,
)

from loom_django.errors import DefinitionError, DirectCallError, FlowNotFoundError, InvalidInputError, shown
from loom_django.kernel import hashing, keys, structure
from loom_django.kernel.backoff import RetryPolicy
from loom_django.kernel.durations import Duration, seconds
from loom_django.kernel.tool_schema import tool_schema

if TYPE_CHECKING:
    from datetime import date
    from uuid import UUID

    from loom_django.engine.context import AsyncFlowContext, FlowContext, StepContext
    from loom_django.runtime import Handle

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MAX_FINGERPRINT: Final = 255

# What an integer column of either database holds.
MAX_INT: Final = 2**31 - 1

Durability = Literal["boundary", "deferred"]
OnError = Literal["fail", "park"]
Divergence = Literal["warn", "fail", "off"]
OnParentClose = Literal["cancel", "abandon"]
AwaitMode = Literal["all", "settled", "any"]


class Tool(Generic[P, R_co]):
    """A function that a step calls. Made by :func:`tool`; run by ``ctx.run(tool, ...)``."""

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        name: str | None = None,
        idempotent: bool | None = None,
        transactional: bool = False,
        in_doubt_on: type[BaseException] | Iterable[type[BaseException]] = (),
        retry: RetryPolicy | None = None,
        timeout: Duration | None = None,
        parse_output: Callable[[Any], Any] | None = None,
    ) -> None:
        self.func = func
        self.name = keys.check_step_name(name or getattr(func, "__name__", ""))
        self.idempotent = idempotent
        self.transactional = transactional
        self.in_doubt_on = _classes(in_doubt_on)
        self.retry = retry
        self.timeout = None if timeout is None else seconds(timeout, "timeout")
        self.parse_output = parse_output
        self.is_async = inspect.iscoroutinefunction(func)
        self.step_id: str | None = None  # set by keyed() and named()
        self.is_keyed = False
        self.__doc__ = func.__doc__
        self.__module__ = getattr(func, "__module__", __name__)
        _check_tool(self)
        self.signature = _signature(func, "StepContext", tool=self.name)
        self._places = _places(self.signature)

    if not TYPE_CHECKING:  # so that a type checker says "not callable", and a running program says what to do

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise DirectCallError(self.name, "tool")

    def keyed(self, key: str | int | UUID | date) -> Tool[P, R_co]:
        """The same tool as the step ``name#key``: for steps in a loop.

        Raises:
            InvalidIdError: the key is no str, int, UUID or date, or cannot be printed.
        """
        changed = copy.copy(self)
        changed.step_id = f"{self.step_id or self.name}#{keys.key_suffix(key)}"
        changed.is_keyed = True
        return changed

    def named(self, step_id: str) -> Tool[P, R_co]:
        """The same tool under another step id: for one tool in two steps. List it so in ``steps=`` too."""
        changed = copy.copy(self)
        changed.step_id = keys.check_step_name(step_id)
        changed.is_keyed = False
        return changed

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments that do not fit the signature.

        Raises:
            TypeError: they do not.
        """
        if kwargs or not args or len(args) != len(self._places):
            self.signature.bind(*args, **kwargs)

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Step[R_co]:
        """The tool with its arguments, as one value."""
        return Step(self, args, kwargs)

    @property
    def declared_id(self) -> str:
        return self.step_id or self.name

    @property
    def schema(self) -> dict[str, Any]:
        """What a model is told of the tool: ``name``, ``description`` and ``parameters``, a JSON schema.

        Raises:
            DefinitionError: a parameter that no model can give.
        """
        return tool_schema(self.declared_id, self.func, self.signature)

    def __repr__(self) -> str:
        return f"<Tool {self.declared_id}>"


class Step(Generic[R_co]):
    """A tool with its arguments; made by :meth:`Tool.bind`."""

    def __init__(self, tool: Tool[..., R_co], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.tool = tool
        self.args = args
        self.kwargs = dict(kwargs)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a branch or a child ended: with ``value``, or with ``error``. ``child`` is the child's id."""

    ok: bool
    value: Any = None
    error: Exception | None = None
    child: str = ""


@dataclass(frozen=True, slots=True)
class Child(Generic[R_co]):
    """A child execution, as its parent knows it; made by ``ctx.start_child``."""

    id: str
    flow_id: str


def _classes(given: type[BaseException] | Iterable[type[BaseException]]) -> tuple[type[BaseException], ...]:
    return (given,) if isinstance(given, type) else tuple(given)


def _check_tool(tool_: Tool[..., Any]) -> None:
    def refuse(problem: str) -> NoReturn:
        raise DefinitionError(tool=tool_.name, problem=problem)

    func = tool_.func
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        refuse("is a generator; a tool returns one value. Return a list, or make several steps")
    if inspect.ismethod(func) or "." in getattr(func, "__qualname__", "").rpartition("<locals>.")[2]:
        refuse("is a method; a tool is a plain function. Move it out of its class")
    if tool_.transactional and tool_.is_async:
        refuse("is transactional and async; Django has no async transactions. Make it a plain def")
    if tool_.transactional and tool_.idempotent is False:
        refuse("is transactional, so its work and its result commit together: leave idempotent=False out")
    if tool_.transactional and tool_.timeout is not None:
        refuse(
            "is transactional, so timeout= cannot end it (another thread is another connection): use the "
            "database's statement_timeout"
        )
    if tool_.in_doubt_on and tool_.idempotent is not False:
        refuse(
            "has in_doubt_on= without idempotent=False: only an effect that must not repeat can be in doubt"
        )
    retried = tool_.retry.retry_on if tool_.retry is not None else ()
    if tool_.idempotent is False and any(issubclass(Exception, cls) for cls in retried):
        refuse(
            "is idempotent=False with a retry= that names no exceptions, or all of them: give retry_on= with "
            "those that prove that nothing happened"
        )


def _signature(
    func: Callable[..., Any], context: str, *, tool: str | None = None, flow_id: str | None = None
) -> inspect.Signature:
    """Return the signature without the context parameter, which must come first."""
    signature = inspect.signature(func)
    parameters = list(signature.parameters.values())
    first = parameters[0] if parameters else None
    annotated = _annotation_name(first.annotation) if first else ""
    fits = first is not None and (first.name == "ctx" or annotated in (context, f"Async{context}"))
    if not fits or (
        first is not None and first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    ):
        raise DefinitionError(
            flow_id,
            tool=tool,
            problem=f"must take the context as its first parameter: def {func.__name__}(ctx: {context}, …)",
        )
    if annotated in _CONTEXTS and annotated not in (context, f"Async{context}"):
        raise DefinitionError(flow_id, tool=tool, problem=f"takes a {annotated}; it gets a {context}")
    if flow_id is not None and annotated in _CONTEXTS:
        wanted = "AsyncFlowContext" if inspect.iscoroutinefunction(func) else "FlowContext"
        if annotated != wanted:
            kind = "async def" if wanted.startswith("Async") else "plain def"
            raise DefinitionError(flow_id, f"is a {kind}, so its ctx is a {wanted}, not a {annotated}")
    return signature.replace(parameters=parameters[1:])


def _places(signature: inspect.Signature) -> tuple[str, ...]:
    """The names of the parameters if all of them can be given by their place, which needs no ``bind``; else none."""
    parameters = signature.parameters.values()
    by_place = all(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)
    return tuple(one.name for one in parameters) if by_place else ()


_CONTEXTS = ("StepContext", "FlowContext", "AsyncFlowContext")


def _annotation_name(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.strip("'\"").rpartition(".")[2]


@overload
def tool(fn: Callable[Concatenate[StepContext, P], Coroutine[Any, Any, R]], /) -> Tool[P, R]: ...
@overload
def tool(fn: Callable[Concatenate[StepContext, P], R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    idempotent: bool | None = None,
    transactional: bool = False,
    in_doubt_on: type[BaseException] | Iterable[type[BaseException]] = (),
    retry: RetryPolicy | None = None,
    timeout: Duration | None = None,
    parse_output: Callable[[Any], Any] | None = None,
) -> _ToolDecorator: ...
def tool(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declare a tool: a function whose first parameter is a ``StepContext``.

    Args:
        name: the step's id; the function's name if left out. It is recorded: keep it when you rename.
        idempotent: ``True`` re-runs after a crash with the same key; ``False`` never re-runs by itself and
            parks for a person when nobody knows whether the effect happened; ``None`` (undeclared) re-runs.
        transactional: the tool's ORM work on loom's database and its result commit together.
        in_doubt_on: exceptions of a non-idempotent tool after which the effect may have happened.
        retry: a :class:`RetryPolicy`; none means one attempt.
        timeout: seconds or timedelta for one attempt.
        parse_output: turns the JSON that an operator types for a verdict into the tool's result.

    Raises:
        DefinitionError: the declaration contradicts itself, with what to write instead.
    """
    if fn is None:
        return functools.partial(Tool, **options)
    return Tool(fn, **options)


class _ToolDecorator:
    """What ``@tool(...)`` is for a type checker; an async function's result is unwrapped."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[StepContext, P], Coroutine[Any, Any, R]], /
    ) -> Tool[P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[StepContext, P], R], /) -> Tool[P, R]: ...
    def __call__(self, fn: Any, /) -> Any:
        raise AssertionError("for type checkers only")


class Options:
    """How an execution is to be started; see :meth:`Flow.using`."""

    def __init__(
        self,
        *,
        execution_id: str | None = None,
        subject: Any = None,
        attributes: Mapping[str, Any] | None = None,
        queue: str | None = None,
        priority: int = 0,
        start_at: datetime | None = None,
        deadline: Duration | datetime | None = None,
        on_parent_close: OnParentClose = "cancel",
    ) -> None:
        self.execution_id = None if execution_id is None else keys.check_execution_id(execution_id)
        self.subject = subject
        if attributes is not None and not isinstance(attributes, Mapping):
            raise InvalidInputError(
                f"attributes={shown(attributes)} must be a mapping of names to plain JSON values"
            )
        self.attributes = dict(attributes or {})
        self.priority = keys.check_whole(priority, "priority", -MAX_INT - 1, MAX_INT)
        self.queue = None if queue is None else keys.check_text(queue, "queue", keys.MAX_QUEUE_NAME)
        self.start_at = None if start_at is None else _checked_instant(start_at)
        self.deadline = deadline
        if on_parent_close not in ("cancel", "abandon"):
            raise InvalidInputError(
                f'on_parent_close={shown(on_parent_close)} must be "cancel" (end with the parent) or "abandon"'
            )
        self.on_parent_close = on_parent_close
        self._given: dict[str, Any] = {}

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the options that were given."""
        return tuple(self._given)

    def changed(self, given: Mapping[str, Any]) -> Options:
        """These options with some of them given anew."""
        together = {**self._given, **given}
        made = Options(**together)
        made._given = together
        return made

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        known = list(inspect.signature(cls.__init__).parameters)[1:]
        for name in names:
            if name not in known:
                hint = " (Flow.using() is not the database's using())" if name == "using" else ""
                raise InvalidInputError(
                    f"{name}= is no option of a start{hint}; the options are {', '.join(known)}"
                )


def _checked_instant(start_at: object) -> datetime:
    if not isinstance(start_at, datetime) or start_at.utcoffset() is None:
        raise InvalidInputError(
            f"start_at={shown(start_at)} must be an aware datetime: give it a time zone, or leave it out to "
            "start at once"
        )
    return start_at


class Flow(Generic[P, R_co]):
    """A durable function. Made by :func:`flow`; started by ``flow.start(...)``."""

    def __init__(self, func: Callable[..., Any], id: str, **declared: Any) -> None:
        self.func = func
        self.id = keys.check_id(id, "flow id")
        self.version: int = declared["version"]
        self.pinned: bool = declared["pinned"]
        self.deadline = declared["deadline"]
        self.durability: Durability | None = declared["durability"]
        self.max_recoveries: int | None = declared["max_recoveries"]
        self.on_error: OnError = declared["on_error"]
        self.divergence: Divergence | None = declared["divergence"]
        self.compatible_with: tuple[str, ...] = _texts(declared["compatible_with"])
        self.step_families: tuple[str, ...] = _texts(declared["step_families"])
        self.is_async = inspect.iscoroutinefunction(func)
        self.__doc__ = func.__doc__
        self.__module__ = getattr(func, "__module__", __name__)
        _check_flow(self)
        self.steps = _declared_steps(self, declared["steps"])
        self.signature = _signature(func, "FlowContext", flow_id=self.id)
        self._places = _places(self.signature)
        self.options = Options()
        facts = self.step_facts()
        self.flow_hash = hashing.structural_hash(facts, self.step_families)
        self.outline = structure.outline(facts, self.step_families)
        self.code_hash = _fingerprint(self, declared["code_fingerprint"])

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise DirectCallError(self.id, "flow")

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Start an execution of this flow and version; idempotent by its execution id.

        Inside ``transaction.atomic()`` on loom's database the execution exists if and only if that block
        commits, and is dispatched then.

        Raises:
            InvalidInputError: the arguments do not fit the flow's signature.
            UnencodableValueError, PayloadTooLargeError: an argument cannot be recorded.
            ExecutionConflictError: the id is taken by another flow or other input.
            StoreUnavailableError: the database stayed away; nobody knows whether the execution exists.
        """
        return _runtime().start_flow(self, args, kwargs)  # type: ignore[no-any-return]

    async def astart(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """:meth:`start`, awaited."""
        return await _runtime().astart_flow(self, args, kwargs)  # type: ignore[no-any-return]

    def using(self, **options: Any) -> Flow[P, R_co]:
        """A copy of the flow with options for its next start; what is not named stays as it was.

        Args:
            execution_id: the execution's id and idempotency key; a random one if left out.
            subject: a model instance that the execution is about.
            attributes: JSON values to filter by.
            queue: one of ``LOOM["QUEUES"]``; "default" if left out.
            priority: within its queue, higher is claimed first.
            start_at: an aware datetime before which its body is not run.
            deadline: seconds, timedelta or an aware datetime for the whole execution.
            on_parent_close: of a child: ``"cancel"`` ends it when its parent ends, ``"abandon"`` leaves it.

        Raises:
            InvalidInputError: an unknown option. InvalidIdError: the id cannot be used.
        """
        Options.check_names(options)
        changed = copy.copy(self)
        changed.options = self.options.changed(options)
        return changed

    def handle(self, execution_id: str) -> Handle[R_co]:
        """The handle of an execution of this flow, typed."""
        return _runtime().handle(execution_id)  # type: ignore[no-any-return]

    def bind_input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind arguments to the signature, defaults applied, by parameter name.

        Raises:
            InvalidInputError: they do not fit.
        """
        if args and not kwargs and len(args) == len(self._places):
            return dict(zip(self._places, args, strict=True))
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise InvalidInputError(f"{exc}: {self.func.__name__}{self.signature}", self.id) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def unbind(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The recorded input as arguments. A parameter that is new since then takes its default."""
        if self._places and all(map(given.__contains__, self._places)):
            return tuple(map(given.__getitem__, self._places)), {}
        known = {name: value for name, value in given.items() if name in self.signature.parameters}
        bound = inspect.BoundArguments(self.signature, OrderedDict(known))
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def step_ids_of(self, tool_: Tool[..., Any]) -> list[str]:
        """The declared ids under which a tool is listed."""
        return self._step_ids.get(id(tool_.func), [])

    @functools.cached_property
    def _step_ids(self) -> dict[int, list[str]]:
        """By the identity of their functions, which the steps keep alive."""
        ids: dict[int, list[str]] = {}
        for step_id, step in self.steps.items():
            ids.setdefault(id(step.func), []).append(step_id)
        return ids

    def step_facts(self) -> list[dict[str, Any]]:
        """What the structural hash covers of each declared step."""
        return [_step_facts(step_id, step) for step_id, step in self.steps.items()]

    def has_structure(self, recorded: str) -> bool:
        """Tell whether a recorded hash, in either form, is this flow's. A log without one says nothing."""
        if recorded.startswith(hashing.LEGACY_PREFIX):
            return recorded == hashing.legacy_hash(self.step_facts(), self.step_families)
        return recorded in ("", self.flow_hash)

    def in_family(self, step_id: str) -> bool:
        """Tell whether an id belongs to a declared step or family: ``base#suffix``, or ``/regex/``."""
        return structure.base_of(step_id) in self.steps or any(
            structure.family_admits(family, step_id) for family in self.step_families
        )

    def __repr__(self) -> str:
        return f"<Flow {self.id} version {self.version}>"


def _texts(given: str | Iterable[str]) -> tuple[str, ...]:
    """Several texts; one that stands alone is one, not its letters."""
    return (given,) if isinstance(given, str) else tuple(given)


def _check_flow(flow_: Flow[..., Any]) -> None:
    def refuse(problem: str) -> NoReturn:
        raise DefinitionError(flow_.id, problem)

    version: object = flow_.version
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= MAX_INT:
        refuse(f"has version {shown(flow_.version)}; a version is an int from 1 to {MAX_INT}")
    if inspect.isgeneratorfunction(flow_.func) or inspect.isasyncgenfunction(flow_.func):
        refuse("is a generator; a flow is a plain or async function")
    for name, value, allowed in (
        ("durability", flow_.durability, (None, "boundary", "deferred")),
        ("on_error", flow_.on_error, ("fail", "park")),
        ("divergence", flow_.divergence, (None, "warn", "fail", "off")),
    ):
        if value not in allowed:
            refuse(f"has {name}={value!r}; it is one of {', '.join(repr(item) for item in allowed)}")
    family: object
    for family in flow_.step_families:
        if not isinstance(family, str):
            refuse(f"lists {shown(family)} in step_families=; a family is the text of a base, or /regex/")
        try:
            structure.family_admits(family, "")
        except (re.error, RecursionError, OverflowError) as exc:
            refuse(f"lists {shown(family)} in step_families=, which is no regular expression: {exc}")
    if flow_.deadline is not None:
        flow_.deadline = seconds(flow_.deadline, "deadline")


def _declared_steps(flow_: Flow[..., Any], steps: Iterable[Any]) -> dict[str, Tool[..., Any]]:
    declared: dict[str, Tool[..., Any]] = {}
    for step in steps:
        if not isinstance(step, Tool):
            raise DefinitionError(flow_.id, f"lists {step!r} in steps=; decorate it with @tool")
        if step.is_keyed:
            raise DefinitionError(
                flow_.id, f"lists {step.declared_id!r} in steps=; list the tool without its key"
            )
        if step.declared_id in declared:
            raise DefinitionError(
                flow_.id,
                f"lists two steps with the id {step.declared_id!r}; give one of them another by .named()",
            )
        declared[step.declared_id] = step
    return declared


def _step_facts(step_id: str, step: Tool[..., Any]) -> dict[str, Any]:
    return {
        "id": step_id,
        "tool": step.name,
        "idempotent": step.idempotent,
        "transactional": step.transactional,
        "fresh_key": bool(step.retry and step.retry.fresh_key),
    }


def _fingerprint(flow_: Flow[..., Any], given: object) -> str:
    if given != "auto":
        text = given or ""
        if not isinstance(text, str) or len(text) > MAX_FINGERPRINT or not text.isprintable():
            raise DefinitionError(
                flow_.id,
                f"has code_fingerprint={shown(given)}; it is printable text of at most {MAX_FINGERPRINT} "
                'characters, or "auto": give a digest of what is longer',
            )
        return text
    try:
        return hashing.body_fingerprint(inspect.getsource(flow_.func))
    except (OSError, TypeError, SyntaxError) as exc:
        raise DefinitionError(
            flow_.id, f'has code_fingerprint="auto", but its source cannot be read ({exc}): give a string'
        ) from exc


class _FlowDecorator:
    """What ``@flow(...)`` is for a type checker; an async function's result is unwrapped."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[AsyncFlowContext, P], Coroutine[Any, Any, R]], /
    ) -> Flow[P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[FlowContext, P], R], /) -> Flow[P, R]: ...
    def __call__(self, fn: Any, /) -> Any:
        raise AssertionError("for type checkers only")


def flow(
    id: str,
    /,
    *,
    version: int = 1,
    steps: Iterable[Tool[..., Any]] = (),
    step_families: Iterable[str] = (),
    pinned: bool = False,
    deadline: Duration | None = None,
    durability: Durability | None = None,
    code_fingerprint: str | None = None,
    compatible_with: Iterable[str] = (),
    max_recoveries: int | None = None,
    on_error: OnError = "fail",
    divergence: Divergence | None = None,
) -> _FlowDecorator:
    """Declare a flow: a function of a ``FlowContext`` that is run again from its top on every resume.

    Args:
        id: the flow's id, recorded with each execution.
        version: an int of 1 or more; several versions may stand side by side.
        steps: the tools that it runs; ``ctx.run`` of another is refused.
        step_families: bases of step ids that are made while it runs (``base#suffix``).
        pinned: serves the executions it has and refuses new ones.
        deadline: seconds or timedelta for a whole execution.
        durability: ``"boundary"`` (a durable marker before every effect) or ``"deferred"``.
        code_fingerprint: a string, or ``"auto"`` for a digest of the body.
        compatible_with: fingerprints of older bodies that this one may continue.
        max_recoveries: takeovers without progress before it parks for an operator.
        on_error: ``"fail"`` ends the execution on an uncaught exception, ``"park"`` waits for a fix.
        divergence: what becomes of an execution whose body does not ask for what its log holds: ``"warn"`` logs it
            and goes on, ``"fail"`` parks it before anything new is done, ``"off"`` does not look. None: by
            the setting ``DIVERGENCE``.

    Raises:
        DefinitionError: the declaration contradicts itself, or the id and version are taken.
    """
    declared = {
        "version": version,
        "steps": steps,
        "step_families": step_families,
        "pinned": pinned,
        "deadline": deadline,
        "durability": durability,
        "code_fingerprint": code_fingerprint,
        "compatible_with": compatible_with,
        "max_recoveries": max_recoveries,
        "on_error": on_error,
        "divergence": divergence,
    }

    def decorate(fn: Callable[..., Any]) -> Flow[..., Any]:
        made: Flow[..., Any] = Flow(fn, id, **declared)
        registry.register(made)
        return made

    return decorate  # type: ignore[return-value]  # the class tells a checker what the closure does


class Registry:
    """The flows of this process, by id and version."""

    def __init__(self) -> None:
        self._flows: dict[str, dict[int, Flow[..., Any]]] = {}
        self._lock = threading.Lock()

    def register(self, flow_: Flow[..., Any]) -> None:
        """Add a flow. The same content again is quiet (reloads); other content is an error."""
        with self._lock:
            versions = self._flows.get(flow_.id, {})
            known = versions.get(flow_.version)
            if known is not None and _content(known) != _content(flow_):
                raise DefinitionError(
                    flow_.id,
                    f"has version {flow_.version} twice, with different content ({_where(known)} and "
                    f"{_where(flow_)}): give the changed one a higher version",
                )
            # In order, and a dict of its own: readers take no lock.
            self._flows[flow_.id] = dict(sorted({**versions, flow_.version: flow_}.items()))

    def forget(self, flow_id: str) -> None:
        """Drop a flow, for tests."""
        with self._lock:
            self._flows.pop(flow_id, None)

    def versions(self, flow_id: str) -> dict[int, Flow[..., Any]]:
        return dict(self._flows.get(flow_id, {}))

    def current(self, flow_id: str, version: int | None = None) -> Flow[..., Any]:
        """The flow to start by id: that version, else the highest that is not pinned.

        Raises:
            FlowNotFoundError: no such flow, or no such version.
        """
        versions = self.versions(flow_id)
        startable = [number for number, flow_ in versions.items() if not flow_.pinned]
        wanted = version if version is not None else max(startable or versions, default=None)
        if wanted is None or wanted not in versions:
            known = [f"version {number}" for number in versions] or sorted(self._flows)
            raise FlowNotFoundError(flow_id, known, version)
        return versions[wanted]

    def highest(self) -> dict[str, int]:
        """Each flow's highest version: what this node can serve."""
        return {flow_id: max(versions) for flow_id, versions in self._flows.items() if versions}

    def all_async(self) -> set[str]:
        """The flows of which each version is an ``async def``."""
        return {
            flow_id
            for flow_id, versions in self._flows.items()
            if versions and all(flow_.is_async for flow_ in versions.values())
        }

    def all(self) -> list[Flow[..., Any]]:
        return [flow_ for flow_id in sorted(self._flows) for flow_ in self.versions(flow_id).values()]


def _content(flow_: Flow[..., Any]) -> tuple[Any, ...]:
    return (
        flow_.flow_hash,
        flow_.code_hash,
        flow_.func.__module__,
        flow_.func.__qualname__,
        flow_.pinned,
        flow_.deadline,
        flow_.durability,
        flow_.max_recoveries,
        flow_.on_error,
        flow_.divergence,
        flow_.compatible_with,
    )


def _where(flow_: Flow[..., Any]) -> str:
    code = inspect.unwrap(flow_.func).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


registry = Registry()

# The one late-bound seam upwards: definitions are made before there is anything to run them on.
_bound_runtime: Callable[[], Any] | None = None


def bind_runtime(getter: Callable[[], Any]) -> None:
    """Tell definitions where the configured runtime is; called once, by the runtime's module."""
    global _bound_runtime
    _bound_runtime = getter


def _runtime() -> Any:
    if _bound_runtime is None:
        raise DefinitionError(problem="no runtime is bound: import loom_django, not loom_django.definitions")
    return _bound_runtime()
