"""What is wrong with a project's settings and declarations is said by ``manage.py check``, with what to type.

Every check carries the tag "loom" and a stable id that is never used again for something else. None of them
queries a database. Ids of errors begin with E; the others are warnings, of which some come with ``--deploy`` only.
"""

from __future__ import annotations

import inspect
import io
import types
import typing
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Final

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.core.files.base import File
from django.db import connections, router
from django.db.models import Manager, Model, QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.utils.connection import ConnectionDoesNotExist
from django.utils.module_loading import import_string

from loom_django import compat, conf
from loom_django.definitions import Flow, Tool, registry
from loom_django.errors import LoomError
from loom_django.kernel import codec
from loom_django.kernel.advice import instead_of, type_name
from loom_django.lint import Finding, Sources, findings_in
from loom_django.scheduling import Schedule, schedules

TAG: Final = "loom"

# Classes whose instances can never be recorded, and none of which a project could register.
_NEVER: Final = (
    Model,
    Manager,
    QuerySet,
    HttpRequest,
    HttpResponseBase,
    File,
    typing.IO,
    io.IOBase,
    Iterator,
    AsyncIterator,
    types.GeneratorType,
)


# The LOOM setting.


@checks.register(TAG)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """E001, E002, E003, E007, E008, E010."""
    raw = getattr(settings, "LOOM", {})
    if not isinstance(raw, Mapping):
        return [
            checks.Error(
                f"LOOM must be a dict, not {type(raw).__name__}.",
                hint='Write LOOM = {"DATABASE": "default"} in the settings, or leave it out.',
                id="loom.E001",
            )
        ]
    found: list[CheckMessage] = []
    for key, value in raw.items():
        found += _check_key(key, value)
    return [*found, *_check_lease(found), *_check_redact(raw.get("REDACT")), *_check_time_zones()]


def _check_key(key: Any, value: Any) -> list[CheckMessage]:
    if key not in conf.KEYS:
        meant = conf.suggestion(str(key))
        hint = f'Did you mean "{meant}"?' if meant else f"The keys are {', '.join(conf.KEYS)}."
        return [checks.Error(f"LOOM[{key!r}] is no setting of loom_django.", hint=hint, id="loom.E002")]
    problem = conf.problem_of(key, value)
    if problem is None:
        return []
    default = getattr(conf.LoomSettings(), key)
    hint = f"Write a fitting value, or leave the key out for its default, {default!r}."
    return [checks.Error(f"LOOM[{key!r}] {problem}.", hint=hint, id="loom.E003")]


def _check_lease(found: list[CheckMessage]) -> list[CheckMessage]:
    if any(message.id == "loom.E003" for message in found):  # the settings cannot be read as they are
        return []
    loom = conf.get_settings()
    if loom.LEASE_TTL >= 3 * loom.LEASE_RENEW_INTERVAL:
        return []
    return [
        checks.Error(
            f'LOOM["LEASE_TTL"] ({loom.LEASE_TTL:g} s) is less than three times LOOM["LEASE_RENEW_INTERVAL"] '
            f"({loom.LEASE_RENEW_INTERVAL:g} s): one late renewal would lose an execution that is alive.",
            hint=f'Set "LEASE_RENEW_INTERVAL" to {loom.LEASE_TTL / 3:g} or less, or raise "LEASE_TTL".',
            id="loom.E007",
        )
    ]


def _check_redact(path: Any) -> list[CheckMessage]:
    if not isinstance(path, str):
        return []
    try:
        hook = import_string(path)
    except Exception as exc:  # importing runs the project's own code
        problem = f"cannot be imported: {exc}"
    else:
        if callable(hook):
            return []
        problem = "is not callable"
    return [
        checks.Error(
            f'LOOM["REDACT"] = {path!r} {problem}.',
            hint='Give the dotted path of a function (value, place) -> value, as "shop.redact.hide_cards".',
            id="loom.E010",
        )
    ]


def _check_time_zones() -> list[CheckMessage]:
    if settings.USE_TZ:
        return []
    return [
        checks.Error(
            "USE_TZ is False: wake times would be ambiguous twice a year.",
            hint="Set USE_TZ = True in the settings.",
            id="loom.E008",
        )
    ]


# The task backend.


@checks.register(TAG)
def check_task_backend(**kwargs: Any) -> list[CheckMessage]:
    """E009."""
    if _setting("DISPATCHER") != "tasks":
        return []
    framework = compat.django_tasks()
    if framework is None:
        return [
            checks.Error(
                'LOOM["DISPATCHER"] is "tasks", and this Django has no Tasks framework.',
                hint='Install the backport, pip install "loom-django[tasks]", or use Django 6.0.',
                id="loom.E009",
            )
        ]
    alias, queue = _setting("TASKS_BACKEND"), _setting("TASKS_QUEUE")
    try:
        backend = framework.task_backends[alias]
    except Exception as exc:  # making a backend imports its module
        return [
            checks.Error(
                f'LOOM["TASKS_BACKEND"] = {alias!r} is no backend that can be used: {exc}.',
                hint=f"The aliases in TASKS are {', '.join(framework.task_backends.settings)}.",
                id="loom.E009",
            )
        ]
    if not backend.queues or queue in backend.queues:
        return []
    return [
        checks.Error(
            f'LOOM["TASKS_QUEUE"] = {queue!r} is no queue of TASKS[{alias!r}].',
            hint=f'Add it to TASKS[{alias!r}]["QUEUES"]; it has {", ".join(sorted(backend.queues))}.',
            id="loom.E009",
        )
    ]


# The database.


@checks.register(TAG)
def check_database(**kwargs: Any) -> list[CheckMessage]:
    """E004, E005, E006, W045."""
    alias = _setting("DATABASE")
    if alias is None:
        return []  # said by E001 or E003
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        return [
            checks.Error(
                f'LOOM["DATABASE"] = {alias!r} is not in DATABASES.',
                hint=f"The aliases are {', '.join(settings.DATABASES)}.",
                id="loom.E004",
            )
        ]
    return [*_check_routers(alias), *_check_engine(alias, connection)]


def _setting(key: str) -> Any:
    """The value of a key of LOOM, or its default; None if it cannot be used, which E001 or E003 says."""
    raw = getattr(settings, "LOOM", {})
    if not isinstance(raw, Mapping):
        return None
    value = raw.get(key, getattr(conf.LoomSettings(), key))
    return value if conf.problem_of(key, value) is None else None


def _check_routers(alias: str) -> list[CheckMessage]:
    from loom_django.models import Execution

    answers = {
        "db_for_read": router.db_for_read(Execution),
        "db_for_write": router.db_for_write(Execution),
        "allow_migrate": alias if router.allow_migrate_model(alias, Execution) else "not this alias",
    }
    wrong = [f"{name} says {answer!r}" for name, answer in answers.items() if answer != alias]
    if not wrong:
        return []
    return [
        checks.Error(
            f'LOOM["DATABASE"] is {alias!r}, but for loom\'s tables the database routers disagree: '
            f"{'; '.join(wrong)}.",
            hint=f'Let a router answer {alias!r} for the app label "loom", or set LOOM["DATABASE"] to its alias.',
            id="loom.E005",
        )
    ]


def _check_engine(alias: str, connection: Any) -> list[CheckMessage]:
    engine = connection.settings_dict["ENGINE"]
    if connection.vendor == "postgresql" and _has_psycopg3():
        return []
    if connection.vendor == "sqlite":
        return _check_memory(alias, connection)
    return [
        checks.Error(
            f"The database {alias!r} runs on {engine}; loom_django knows PostgreSQL (with psycopg 3) and SQLite.",
            hint='Install psycopg 3: pip install "loom-django[postgres]".'
            if connection.vendor == "postgresql"
            else 'Name an alias of PostgreSQL or SQLite in LOOM["DATABASE"].',
            id="loom.E006",
        )
    ]


def _has_psycopg3() -> bool:
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    return is_psycopg3


def _check_memory(alias: str, connection: Any) -> list[CheckMessage]:
    if not connection.is_in_memory_db():
        return []
    return [
        checks.Warning(
            f"The database {alias!r} is SQLite in memory: a worker, a timer loop or a lease renewal has no "
            "second connection to it.",
            hint='Give "NAME" a file; for tests give one in "TEST": {"NAME": …}.',
            id="loom.W045",
        )
    ]


# Flows and tools.


@checks.register(TAG)
def check_annotations(**kwargs: Any) -> list[CheckMessage]:
    """E020: a parameter or a result that cannot be recorded, seen before any effect happened."""
    return [
        _unrecordable(label, place, cls)
        for label, owner in _declared()
        for place, annotation in _annotations(owner)
        for cls in _classes_in(annotation)
        if _cannot_be_recorded(cls)
    ]


def _declared() -> Iterator[tuple[str, Flow[..., Any] | Tool[..., Any]]]:
    for flow in registry.all():
        yield f'flow "{flow.id}" version {flow.version}', flow
    yield from ((f'tool "{tool.name}"', tool) for tool in _tools())


def _tools() -> list[Tool[..., Any]]:
    """Every tool that a flow lists, once."""
    found = {tool.func: tool for flow in registry.all() for tool in flow.steps.values()}
    return list(found.values())


def _annotations(owner: Flow[..., Any] | Tool[..., Any]) -> Iterator[tuple[str, Any]]:
    try:
        hints = typing.get_type_hints(owner.func)
    except Exception:  # names that exist for a type checker only
        return
    for name in owner.signature.parameters:
        if name in hints:
            yield f"parameter {name}", hints[name]
    if "return" in hints:
        yield "result", hints["return"]


def _classes_in(annotation: Any) -> Iterator[type]:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return
    if isinstance(origin, type) and origin is not types.UnionType:
        yield origin
    elif isinstance(annotation, type):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _classes_in(argument)


def _cannot_be_recorded(cls: type) -> bool:
    if codec.recordable(cls):
        return False
    return is_dataclass(cls) or issubclass(cls, (Enum, *_NEVER))


def _unrecordable(label: str, place: str, cls: type) -> CheckMessage:
    return checks.Error(
        f"The {place} of {label} is a {type_name(cls)}, which cannot be recorded.",
        hint=instead_of(cls),
        id="loom.E020",
    )


@checks.register(TAG)
def check_tools(**kwargs: Any) -> list[CheckMessage]:
    """W010, W011."""
    return [*_each_tool(_check_in_doubt_on), *_each_tool(_check_aliases)]


def _each_tool(check: Callable[[Tool[..., Any]], Iterable[CheckMessage]]) -> list[CheckMessage]:
    return [message for tool in _tools() for message in check(tool)]


def _check_in_doubt_on(tool: Tool[..., Any]) -> Iterable[CheckMessage]:
    if tool.idempotent is False and not tool.in_doubt_on:
        yield checks.Warning(
            f'The tool "{tool.name}" must not run twice, and no exception of it leaves the effect in doubt: a '
            "lost connection after the request was sent would count as a failure that is known.",
            hint="Name the exceptions after which it may have happened: in_doubt_on=(requests.Timeout, …), or "
            "in_doubt_on=Exception to be careful.",
            id="loom.W010",
        )


def _check_aliases(tool: Tool[..., Any]) -> Iterable[CheckMessage]:
    alias = _setting("DATABASE")
    if not tool.transactional or alias is None:
        return
    for model in _models_named_in(tool.func):
        other = router.db_for_write(model)
        if other != alias:
            yield checks.Warning(
                f'The transactional tool "{tool.name}" names {model._meta.label}, which is written to {other!r}: '
                f"only work on {alias!r} commits together with the step.",
                hint="Do that work in a tool of its own, with idempotent=True.",
                id="loom.W011",
            )


def _models_named_in(func: Callable[..., Any]) -> list[type[Model]]:
    """The models that a function's own code names as globals: what can be seen without running it."""
    func = inspect.unwrap(func)
    names = getattr(getattr(func, "__code__", None), "co_names", ())
    values = [getattr(func, "__globals__", {}).get(name) for name in names]
    return [value for value in values if isinstance(value, type) and issubclass(value, Model)]


@checks.register(TAG)
def check_type_names(**kwargs: Any) -> list[CheckMessage]:
    """W013."""
    return [
        checks.Warning(
            f"{entry.name} is registered without a name of its own: moving the class would make recorded values "
            "unreadable.",
            hint=f'Keep today\'s name for good: register_type(…, name="{entry.name}").',
            id="loom.W013",
        )
        for entry in codec.registered_types()
        if not entry.explicit
    ]


# Bodies of flows.


@checks.register(TAG)
def check_bodies(**kwargs: Any) -> list[CheckMessage]:
    """W101 to W109."""
    sources = Sources()
    return [
        checks.Warning(
            finding.message,
            hint=f"{finding.hint} If it is meant, end the line with  # loom: ok",
            obj=f"{finding.filename}:{finding.line}",
            id=f"loom.{finding.id}",
        )
        for flow in registry.all()
        for finding in _findings(flow, sources)
    ]


def _findings(flow: Flow[..., Any], sources: Sources) -> list[Finding]:
    try:
        return findings_in(flow, sources)
    except Exception:  # advice about code that runs: no oddity of it may stop a command
        return []


# Schedules.


@checks.register(TAG)
def check_schedules(**kwargs: Any) -> list[CheckMessage]:
    """E011, W030."""
    return [message for schedule in schedules.all() for message in _check_schedule(schedule)]


def _check_schedule(schedule: Schedule) -> Iterator[CheckMessage]:
    try:
        flow = schedule.flow()
        schedule.bound(flow)
    except LoomError as exc:
        yield checks.Error(
            f'The schedule "{schedule.id}" cannot start its flow: {exc}',
            hint="Name a flow that is declared, and the arguments that it takes, in args= and kwargs=.",
            id="loom.E011",
        )
    else:
        if flow.pinned:
            yield checks.Error(
                f'The schedule "{schedule.id}" names version {flow.version} of the flow "{flow.id}", which is '
                "pinned and starts nothing new.",
                hint="Name the flow by its id, or the version that takes new starts.",
                id="loom.E011",
            )
    queues = _queues()
    if schedule.queue is not None and queues is not None and schedule.queue not in queues:
        yield checks.Error(
            f'The schedule "{schedule.id}" names the queue "{schedule.queue}", which is not declared.',
            hint=f'Add it to LOOM["QUEUES"]; it has {", ".join(sorted(queues))}.',
            id="loom.E011",
        )
    if not schedule.zone_was_given and settings.TIME_ZONE != "UTC":
        yield checks.Warning(
            f'The schedule "{schedule.id}" names no time_zone, so "{schedule.cron}" is read in UTC, while '
            f"TIME_ZONE is {settings.TIME_ZONE}.",
            hint=f'Say which is meant: time_zone="{settings.TIME_ZONE}" or time_zone="UTC".',
            id="loom.W030",
        )


def _queues() -> Collection[str] | None:
    """The names of the declared queues; None if the settings cannot be read, which another check says."""
    try:
        return conf.get_settings().queues
    except ImproperlyConfigured:
        return None


# Advice for production.


@checks.register(TAG, deploy=True)
def check_undeclared_tools(**kwargs: Any) -> list[CheckMessage]:
    """W012."""
    return [
        checks.Warning(
            f'The tool "{tool.name}" does not say whether it may run twice; after a crash it does.',
            hint="Declare idempotent=True if it sends its idempotency key along, idempotent=False if a person "
            "must decide, or transactional=True if it only writes to the database.",
            id="loom.W012",
        )
        for tool in _tools()
        if tool.idempotent is None and not tool.transactional
    ]


@checks.register(TAG, deploy=True)
def check_dispatcher(**kwargs: Any) -> list[CheckMessage]:
    """W040."""
    if _setting("DISPATCHER") == "tasks" and not check_task_backend():
        return _check_stand_in(_setting("TASKS_BACKEND"))
    if _setting("DISPATCHER") != "inline":
        return []
    return [
        checks.Warning(
            'LOOM["DISPATCHER"] is "inline": flows run inside the request that starts or answers them.',
            hint='Set LOOM = {"DISPATCHER": "worker"} and run manage.py run_loom_worker.',
            id="loom.W040",
        )
    ]


def _check_stand_in(alias: str) -> list[CheckMessage]:
    """Django's two backends for development: one runs a task inside the caller, the other one never."""
    stand_in = compat.runs_no_task(compat.django_tasks().task_backends[alias])
    if not stand_in:
        return []
    where = {
        "immediate": "flows run inside the request that starts or answers them",
        "dummy": "no flow runs",
    }[stand_in]
    return [
        checks.Warning(
            f'LOOM["TASKS_BACKEND"] = {alias!r} is Django\'s {stand_in} backend: {where}.',
            hint=f"Give TASKS[{alias!r}] a backend that has workers, as django_tasks_db.DatabaseBackend.",
            id="loom.W040",
        )
    ]


@checks.register(TAG, deploy=True)
def check_retention(**kwargs: Any) -> list[CheckMessage]:
    """W041."""
    ages = _setting("RETENTION")
    if ages is None or any(age is not None for age in ages.values()):
        return []
    return [
        checks.Warning(
            'LOOM["RETENTION"] has no age for any status: loom_prune removes nothing, and the log grows for ever.',
            hint='Give ages, as {"COMPLETED": timedelta(days=90)}, and run manage.py loom_prune every night.',
            id="loom.W041",
        )
    ]


@checks.register(TAG, deploy=True)
def check_old_versions(**kwargs: Any) -> list[CheckMessage]:
    """W043: only the database knows whether anybody still needs one."""
    return [
        checks.Warning(
            f'Version {flow.version} of the flow "{flow.id}" is kept for the executions that it has started.',
            hint="manage.py loom_deploy_check tells how many are left, and when it can be removed.",
            id="loom.W043",
        )
        for flow in registry.all()
        if flow.pinned
    ]


@checks.register(TAG, deploy=True)
def check_divergence(**kwargs: Any) -> list[CheckMessage]:
    """W044."""
    if _setting("DIVERGENCE") in (None, "fail"):
        return []
    return [
        checks.Warning(
            f'LOOM["DIVERGENCE"] is {_setting("DIVERGENCE")!r}: an execution whose body skips what its log holds, as '
            "after a deploy that changed the body, goes on and may repeat effects.",
            hint='Set "DIVERGENCE": "fail": such executions park, and loom.retry_diverged runs them again.',
            id="loom.W044",
        )
    ]


@checks.register(TAG, deploy=True)
def check_notices(**kwargs: Any) -> list[CheckMessage]:
    """W042."""
    alias, notices = _setting("DATABASE"), _setting("NOTIFY")
    if alias not in settings.DATABASES or not notices:
        return []
    connection = connections[alias]
    pooled = connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    if connection.vendor != "postgresql" or not pooled:
        return []
    return [
        checks.Warning(
            f"The database {alias!r} has DISABLE_SERVER_SIDE_CURSORS, as behind a transaction pooler, and "
            'LOOM["NOTIFY"] is on: notices do not come through such a pooler, and loops look only once a second.',
            hint='Set "NOTIFY": False, so that they look four times a second, or give loom a direct connection.',
            id="loom.W042",
        )
    ]
