"""Each system check says what is wrong and what to type."""

from __future__ import annotations

import enum
import io
import types
import unittest.mock
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import IO, Any

import pytest
from django.contrib.auth.models import User
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db.models import QuerySet
from django.http import HttpRequest

from loom_django import (
    FlowContext,
    RetryPolicy,
    StepContext,
    compat,
    conf,
    flow,
    register_type,
    schedule,
    scheduling,
    tool,
)
from loom_django import checks as loom_checks
from loom_django.definitions import registry
from loom_django.kernel import codec
from loom_django.tasks import run_task
from tests.shop.models import Ledger, Order

pytestmark = pytest.mark.once


def found(*, deploy: bool = False) -> dict[str, checks.CheckMessage]:
    """What loom's checks say, by id."""
    return {
        str(message.id): message
        for message in checks.run_checks(tags=["loom"], include_deployment_checks=deploy)
    }


@pytest.fixture(autouse=True)
def only_own_flows(monkeypatch):
    """A registry with nothing but what a test declares."""
    monkeypatch.setattr(registry, "_flows", {})
    monkeypatch.setattr(scheduling.schedules, "_schedules", {})


@pytest.fixture(autouse=True)
def only_own_types(monkeypatch):
    """No types but those that a test registers."""
    monkeypatch.setattr(codec, "_by_class", {})
    monkeypatch.setattr(codec, "_by_name", {})


def test_the_tests_settings_are_fine():
    """Nothing to say about a project that is set up as it should be."""
    assert found() == {}


def test_the_checks_are_bound(settings):
    """manage.py check runs them, and fails on an error."""
    settings.LOOM = {"DATABSE": "default"}
    with pytest.raises(SystemCheckError, match=r"loom\.E002"):
        call_command("check", "--tag", "loom", stderr=io.StringIO())


# Settings.


@pytest.mark.parametrize("value", [None, [], "default", 1])
def test_e001_the_setting_is_a_dict(settings, value):
    """Anything else is refused once, and nothing else is said about it."""
    settings.LOOM = value
    assert set(found(deploy=True)) == {"loom.E001"}


def test_e002_an_unknown_key_is_named_with_the_key_that_is_meant(settings):
    """A slip of the pen is told from a key of nothing."""
    settings.LOOM = {"LEASE_TLT": 60}
    assert 'Did you mean "LEASE_TTL"?' in str(found()["loom.E002"].hint)
    settings.LOOM = {"COLOUR": "red"}
    assert "The keys are DATABASE" in str(found()["loom.E002"].hint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("LEASE_TTL", "60"),
        ("LEASE_TTL", None),
        ("POLL_INTERVAL", 0),
        ("NOTIFY", 1),
        ("QUEUES", ["default"]),
        ("QUEUES", {"mail": None}),
        ("QUEUES", {"": {}}),
        ("QUEUES", {"m" * 101: {}}),
        ("QUEUES", {"a\nb": {}}),
        ("QUEUES", {3: {}}),
        ("QUEUES", {"mail": {"limit": 3}}),
        ("QUEUES", {"mail": {"concurrency": 0}}),
        ("QUEUES", {"mail": {"concurrency": True}}),
        ("QUEUES", {"mail": {"worker_concurrency": 1.5}}),
        ("QUEUES", {"mail": {"rate": 0}}),
        ("QUEUES", {"mail": {"rate": float("nan")}}),
        ("QUEUES", {"mail": {"rate": "5/m"}}),
        ("QUEUES", {"mail": {"priority": None}}),
        ("QUEUES", {"mail": {"priority": 2**31}}),
        ("LEASE_TTL", -1),
        ("LEASE_TTL", 0),
        ("LEASE_TTL", float("nan")),
        ("LEASE_TTL", True),
        ("MAX_PAYLOAD_BYTES", 1.5),
        ("MAX_PAYLOAD_BYTES", True),
        ("DISPATCHER", "celery"),
        ("DATABASE", ""),
        ("DATABASE", 1),
        ("REDACT", len),
        ("RETENTION", None),
        ("RETENTION", ["COMPLETED"]),
        ("RETENTION", {"SUSPENDED": 60}),
        ("RETENTION", {"COMPLETED": 0}),
        ("RETENTION", {"COMPLETED": "90 days"}),
        ("ARCHIVE_STORAGE", "archive"),
        ("ARCHIVE_STORAGE", ["default"]),
    ],
)
def test_e003_a_value_of_the_wrong_kind_is_named(settings, key, value):
    """With the default that leaving it out would give."""
    settings.LOOM = {key: value}
    message = found()["loom.E003"]
    assert f"LOOM[{key!r}]" in message.msg
    assert "default" in str(message.hint)


def test_e007_a_lease_outlives_a_late_renewal(settings):
    """Three renewals fit into a lease, whatever the defaults make of a half-set pair."""
    settings.LOOM = {"LEASE_TTL": 60, "LEASE_RENEW_INTERVAL": 20.1}
    assert set(found()) == {"loom.E007"}
    settings.LOOM = {"LEASE_TTL": 30}
    assert set(found()) == {"loom.E007"}
    settings.LOOM = {"LEASE_TTL": 60, "LEASE_RENEW_INTERVAL": 20}
    assert found() == {}


def test_e008_times_have_zones(settings):
    """A wake time without a zone is ambiguous twice a year."""
    settings.USE_TZ = False
    assert set(found()) == {"loom.E008"}


TASKS = compat.django_tasks().__name__
RECORDING = "tests.task_backends.recording.RecordingBackend"


def test_e009_the_task_backend_is_there(settings, use_tasks):
    """An alias that TASKS does not have, a class that cannot be imported, a queue that it does not serve."""
    use_tasks(default=RECORDING, broken="shop.backends.Gone")
    settings.LOOM = {"DISPATCHER": "tasks", "DIVERGENCE": "fail"}
    assert found(deploy=True) == {}
    settings.LOOM = {"DISPATCHER": "tasks", "TASKS_BACKEND": "celery"}
    assert "default, broken" in str(found()["loom.E009"].hint)
    settings.LOOM = {"DISPATCHER": "tasks", "TASKS_BACKEND": "broken"}
    assert "shop.backends.Gone" in found()["loom.E009"].msg
    settings.LOOM = {"DISPATCHER": "tasks", "TASKS_QUEUE": "flows"}
    assert "QUEUES" in str(found()["loom.E009"].hint)
    settings.LOOM = {"TASKS_BACKEND": "celery", "TASKS_QUEUE": "flows"}
    assert found() == {}


def test_e009_the_tasks_framework_is_there(settings, monkeypatch):
    """Django 5.2 has none of its own; the hint names the extra. A start says the same."""
    settings.LOOM = {"DISPATCHER": "tasks"}
    monkeypatch.setattr(compat, "django_tasks", lambda: None)
    assert "loom-django[tasks]" in str(found(deploy=True)["loom.E009"].hint)
    with pytest.raises(ImproperlyConfigured, match=r"loom-django\[tasks\]"):
        run_task()


@pytest.mark.parametrize(("name", "says"), [("immediate", "inside the request"), ("dummy", "no flow runs")])
def test_w040_the_frameworks_stand_ins_are_not_for_production(settings, use_tasks, name, says):
    """One is the inline dispatcher by another name, and the other one is nobody."""
    use_tasks(default=f"{TASKS}.backends.{name}.{name.title()}Backend")
    settings.LOOM = {"DISPATCHER": "tasks"}
    assert found() == {}
    assert says in found(deploy=True)["loom.W040"].msg


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("shop.redact.hide", "cannot be imported"),
        ("nodots", "cannot be imported"),
        ("django.VERSION", "not callable"),
    ],
)
def test_e010_the_redaction_hook_can_be_called(settings, path, says):
    """A hook that is not there would be found when an operator opens a page."""
    settings.LOOM = {"REDACT": path}
    assert says in found()["loom.E010"].msg
    settings.LOOM = {"REDACT": "builtins.max"}
    assert found() == {}


# The database.


def test_e004_the_alias_exists(settings):
    """The hint lists those that do."""
    settings.LOOM = {"DATABASE": "log"}
    message = found()["loom.E004"]
    assert str(message.hint) == "The aliases are default."


class ElsewhereRouter:
    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "elsewhere" if model._meta.app_label == "loom" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db == "elsewhere" if app_label == "loom" else None


class LedgerElsewhere:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "elsewhere" if model is Ledger else None


def test_e005_the_routers_agree(settings):
    """Each answer that differs is named."""
    settings.DATABASE_ROUTERS = ["tests.test_checks.ElsewhereRouter"]
    message = found()["loom.E005"]
    for name in ("db_for_read", "db_for_write", "allow_migrate"):
        assert name in message.msg


@pytest.mark.parametrize(
    ("vendor", "engine", "hint"),
    [("mysql", "django.db.backends.mysql", "Name an alias"), ("oracle", "x", "Name an alias")],
)
def test_e006_the_engine_is_known(monkeypatch, vendor, engine, hint):
    """Other databases have other locks."""
    from django.db import connections

    connection = connections["default"]
    monkeypatch.setattr(connection, "vendor", vendor)
    monkeypatch.setitem(connection.settings_dict, "ENGINE", engine)
    message = found()["loom.E006"]
    assert engine in message.msg
    assert hint in str(message.hint)


def test_e006_postgresql_is_spoken_to_by_psycopg_3(monkeypatch):
    """The older driver knows neither prepared statements nor what loom binds."""
    from django.db import connections

    monkeypatch.setattr(connections["default"], "vendor", "postgresql")
    monkeypatch.setattr("loom_django.checks._has_psycopg3", lambda: False)
    assert "pip install" in str(found()["loom.E006"].hint)
    monkeypatch.setattr("loom_django.checks._has_psycopg3", lambda: True)
    assert found() == {}


def test_w045_sqlite_is_a_file(monkeypatch):
    """A second connection meets another database."""
    from django.db import connections

    connection = connections["default"]
    monkeypatch.setattr(connection, "vendor", "sqlite")
    monkeypatch.setattr(connection, "is_in_memory_db", lambda: True, raising=False)
    assert set(found()) == {"loom.W045"}


# Flows and tools.


class Colour(enum.Enum):
    RED = 1


@dataclass
class Money:
    amount: Decimal


def declare(annotation: Any, *, on: str = "parameter") -> None:
    """A flow with a tool that takes or gives such a value."""

    def takes(ctx: StepContext, value: Any) -> None: ...

    def gives(ctx: StepContext) -> Any: ...

    func = takes if on == "parameter" else gives
    func.__annotations__["value" if on == "parameter" else "return"] = annotation
    made = tool(idempotent=True)(func)

    @flow("f", steps=[made])
    def body(ctx: FlowContext) -> None: ...


@pytest.mark.parametrize("on", ["parameter", "result"])
@pytest.mark.parametrize(
    ("annotation", "hint"),
    [
        (Order, "pk"),
        (User, "pk"),
        (list[Order], "pk"),
        (dict[str, tuple[int, Order]], "pk"),
        (Order | None, "pk"),
        (QuerySet, "values_list"),
        (HttpRequest, "request"),
        (IO[str], "plain data"),
        (io.BytesIO, "Store the file"),
        (Iterator[int], "list"),
        (Generator[int, None, None], "list"),
        (Colour, "register_type"),
        (Money, "register_type"),
    ],
)
def test_e020_what_cannot_be_recorded_is_found_before_it_happens(annotation, hint, on):
    """A tool that returns it would have had its effect already."""
    declare(annotation, on=on)
    message = found()["loom.E020"]
    assert f"The {'result' if on == 'result' else 'parameter value'} of tool" in message.msg
    assert hint in str(message.hint)


@pytest.mark.parametrize(
    "annotation",
    [
        int,
        str,
        Decimal,
        datetime,
        list[int],
        dict[str, Any],
        Any,
        int | None,
        "NotHere",
        object,
        tuple[int, ...],
    ],
)
def test_e020_spares_what_can_be_recorded_or_not_be_judged(annotation):
    """Also annotations that exist for a type checker only."""
    declare(annotation)
    assert found() == {}


def test_e020_spares_registered_classes():
    """Once they are registered."""
    register_type(Colour, name="tests.Colour")
    register_type(Money, name="tests.Money")
    declare(list[Colour])
    declare(Money)
    assert found() == {}


def test_e020_looks_at_flows_too():
    """Their parameters and results."""

    @flow("f")
    def body(ctx: FlowContext, order: Order) -> Order:
        return order

    messages = [message.msg for message in checks.run_checks(tags=["loom"]) if message.id == "loom.E020"]
    assert len(messages) == 2
    assert all('flow "f" version 1' in text for text in messages)


def declare_tool(**options: Any) -> None:
    @tool(**options)
    def work(ctx: StepContext) -> None: ...

    @flow("f", steps=[work])
    def body(ctx: FlowContext) -> None: ...


def test_w010_a_dangerous_tool_says_what_leaves_it_in_doubt():
    """A lost connection would be taken for a failure that is known."""
    declare_tool(idempotent=False)
    assert "in_doubt_on=" in str(found()["loom.W010"].hint)


@pytest.mark.parametrize(
    "options",
    [{"idempotent": False, "in_doubt_on": Exception}, {"idempotent": True, "retry": RetryPolicy()}],
)
def test_w010_spares_who_says_so(options):
    """Named exceptions, or a tool that may run twice."""
    declare_tool(**options)
    assert found() == {}


def test_w011_a_transactional_tool_stays_on_its_database(settings):
    """What it writes elsewhere does not commit together with its step."""
    settings.DATABASE_ROUTERS = ["tests.test_checks.LedgerElsewhere"]

    @tool(transactional=True)
    def book(ctx: StepContext) -> None:
        Order.objects.create(customer="c", amount=1)
        Ledger.objects.create(key="k", step="s")

    @flow("f", steps=[book])
    def body(ctx: FlowContext) -> None: ...

    message = found()["loom.W011"]
    assert "shop.Ledger" in message.msg
    assert "shop.Order" not in message.msg
    settings.DATABASE_ROUTERS = []
    assert found() == {}


def test_w012_an_undeclared_tool_is_named_at_deploy_time():
    """Advice, not noise while developing."""
    declare_tool()
    assert found() == {}
    assert "idempotent=True" in str(found(deploy=True)["loom.W012"].hint)


@pytest.mark.parametrize("options", [{"idempotent": True}, {"transactional": True}])
def test_w012_spares_declared_tools(options):
    """Both say what happens after a crash."""
    declare_tool(**options)
    assert "loom.W012" not in found(deploy=True)


def test_w013_a_registered_type_has_a_name_of_its_own():
    """The hint keeps today's name, under which values are recorded already."""
    register_type(Colour)
    assert 'name="tests.test_checks.Colour"' in str(found()["loom.W013"].hint)


def test_w040_inline_is_not_for_production(settings):
    """Said at deploy time only, and not to who uses workers."""
    settings.LOOM = {}
    assert "loom.W040" not in found()
    assert "run_loom_worker" in str(found(deploy=True)["loom.W040"].hint)
    settings.LOOM = {"DISPATCHER": "worker"}
    assert "loom.W040" not in found(deploy=True)


def test_w041_something_has_an_age(settings):
    """A project that keeps everything is told so at deploy time; ages may be of any kind of duration."""
    for kept in ({}, {"COMPLETED": None}):
        settings.LOOM = {"RETENTION": kept}
        assert "loom.W041" not in found()
        assert "loom_prune" in str(found(deploy=True)["loom.W041"].hint)
    settings.LOOM = {"RETENTION": {"FAILED": timedelta(days=1)}, "ARCHIVE_STORAGE": "default"}
    assert not {"loom.W041", "loom.E003"} & set(found(deploy=True))
    assert conf.get_settings().RETENTION == {"FAILED": 86_400.0}


def test_w043_an_old_version_is_kept_until_nobody_needs_it():
    """Said at deploy time, with the command that knows."""

    @flow("kept", pinned=True)
    def body(ctx: FlowContext) -> None:
        """An old one."""

    assert "loom.W043" not in found()
    assert "loom_deploy_check" in str(found(deploy=True)["loom.W043"].hint)


def test_a_deployment_is_told_that_divergence_does_not_park(settings):
    """W044, unless the setting is "fail"; a word that is none is an error."""
    for said in ({}, {"DIVERGENCE": "warn"}, {"DIVERGENCE": "off"}):
        settings.LOOM = said
        assert "loom.W044" not in found()
        assert "retry_diverged" in str(found(deploy=True)["loom.W044"].hint)
    settings.LOOM = {"DIVERGENCE": "fail"}
    assert "loom.W044" not in found(deploy=True)
    settings.LOOM = {"DIVERGENCE": "ignore"}
    assert {"loom.E003"} <= set(found(deploy=True))
    assert "loom.W044" not in found(deploy=True)


# Schedules.


@pytest.fixture
def audit():
    @flow("audit")
    def body(ctx: FlowContext, scope: str) -> None:
        """It takes a scope."""

    return body


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"flow": "nobody"}, 'flow "nobody" is not registered here'),
        ({"flow": "audit"}, "scope"),
        ({"flow": "audit", "kwargs": {"scop": "all"}}, "scop"),
    ],
)
def test_e011_a_schedule_can_start_its_flow(audit, options, says):
    """A flow by its id is looked up when all modules are there."""
    schedule("nightly", cron="30 3 * * *", **options)
    message = found()["loom.E011"]
    assert 'The schedule "nightly" cannot start its flow' in message.msg
    assert says in message.msg


def test_e011_a_pinned_version_starts_nothing():
    """A flow that is given fixes its version."""

    @flow("audit", pinned=True)
    def body(ctx: FlowContext) -> None:
        """The old one."""

    schedule("nightly", flow=body, cron="30 3 * * *")
    assert "pinned" in found()["loom.E011"].msg


def test_e011_the_queue_is_declared(settings, audit):
    """A run on another one would be refused at half past three."""
    schedule("nightly", flow=audit, cron="30 3 * * *", args=["all"], queue="slow")
    assert 'queue "slow"' in found()["loom.E011"].msg
    settings.LOOM = {"QUEUES": {"slow": {}}}
    assert found() == {}


def test_e011_spares_what_fits(audit):
    """By the flow or by its id."""
    schedule("a", flow=audit, cron="30 3 * * *", args=["all"])
    schedule("b", flow="audit", cron="30 3 * * *", kwargs={"scope": "all"})
    assert found() == {}


def test_w030_a_zone_that_was_left_out_is_meant(settings, audit):
    """Where the project lives in another zone than UTC, half past three is somebody's guess."""
    schedule("nightly", flow=audit, cron="30 3 * * *", args=["all"])
    assert found() == {}
    settings.TIME_ZONE = "Europe/Berlin"
    message = found()["loom.W030"]
    assert 'schedule "nightly" names no time_zone' in message.msg
    assert 'time_zone="Europe/Berlin"' in (message.hint or "")


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_w030_spares_a_zone_that_is_given(settings, audit, zone):
    """Also UTC, if it is said."""
    settings.TIME_ZONE = "Europe/Berlin"
    schedule("nightly", flow=audit, cron="30 3 * * *", time_zone=zone, args=["all"])
    assert found() == {}


def test_w042_notices_do_not_come_through_a_pooler(settings):
    """Said of PostgreSQL alone, at deploy time, and not to who has switched them off."""
    settings.LOOM = {"DISPATCHER": "worker"}
    pooled = {"vendor": "postgresql", "settings_dict": {"DISABLE_SERVER_SIDE_CURSORS": True}}
    direct = {"vendor": "postgresql", "settings_dict": {"DISABLE_SERVER_SIDE_CURSORS": False}}
    sqlite = {"vendor": "sqlite", "settings_dict": {"DISABLE_SERVER_SIDE_CURSORS": True}}
    said = []
    for about in (pooled, direct, sqlite):
        with unittest.mock.patch.object(
            loom_checks, "connections", {"default": types.SimpleNamespace(**about)}
        ):
            said.append([str(message.hint) for message in loom_checks.check_notices()])
            settings.LOOM = {"DISPATCHER": "worker", "NOTIFY": False}
            assert loom_checks.check_notices() == []
            settings.LOOM = {"DISPATCHER": "worker"}
    assert said[1:] == [[], []]
    assert '"NOTIFY": False' in said[0][0]
    assert "loom.W042" not in found()
