"""Each trap of a flow's body is told with the line and the way out, and what only looks like one is not."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import subprocess
import sys
import textwrap
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.utils.functional import SimpleLazyObject

from loom_django import FlowContext, StepContext, flow, tool
from loom_django.definitions import registry
from loom_django.lint import IDS, Finding, Sources, findings_in, rules, sources

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent

PRELUDE = """
import asyncio, contextlib, functools, os, random, secrets, socket, subprocess, threading, time, urllib.parse
import uuid, urllib.request
import datetime as dates
import random as chance
from asyncio import gather
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, datetime as dt, timedelta
from os import environ, urandom
from pathlib import Path
from random import choice
from time import time as seconds
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.cache import cache
from django.core.mail import send_mail
from django.db import connection, transaction
from django.shortcuts import get_object_or_404
from django.utils import timezone, translation
from django.utils.timezone import now
from loom_django import ChildFailed, FlowContext, StepContext, StepFailed, flow, tool
from tests.shop.models import Order

SKUS = frozenset({"a", "b"})
RNG = random.Random(7)
LOCK = threading.Lock()

@tool
def charge(ctx: StepContext, *args): return datetime.now(UTC)
@tool
def ship(ctx: StepContext, *args): return 1
@tool
def refund(ctx: StepContext, *args): return 1
@flow("lint.other")
def other(ctx: FlowContext): pass

def plain(ctx): return 1
def helper(ctx: FlowContext): return time.time()
def good_helper(ctx: FlowContext): return ctx.now()
def planned(ctx: FlowContext): return ctx.run(refund, timezone.now())
def recursive(ctx): return recursive(ctx)
def made(name): return time.time() and plain
def flag(name): return bool(settings.DEBUG)
"""

STEPS = "steps=[charge, ship, charge.named('rest')]"


@pytest.fixture(autouse=True)
def only_own_flows(monkeypatch):
    """A registry with nothing but what a test declares."""
    monkeypatch.setattr(registry, "_flows", {})


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Run the text of a module that begins with the prelude; its names."""

    def run(text: str) -> dict[str, Any]:
        file = tmp_path / "flows.py"
        file.write_text(PRELUDE + text)
        linecache.checkcache(str(file))
        names: dict[str, Any] = {"__name__": "tests.shop.linted", "__package__": "tests.shop"}
        exec(compile(file.read_text(), str(file), "exec"), names)  # noqa: S102
        return names

    return run


@pytest.fixture
def findings(module) -> Callable[..., list[Finding]]:
    """What is said about a flow with that body."""

    def find(body: str, *, options: str = STEPS, parameters: str = "") -> list[Finding]:
        kind = "async def" if "await" in body or "async " in body else "def"
        text = textwrap.indent(textwrap.dedent(body).strip(), "    ")
        names = module(f"\n@flow('lint.case', {options})\n{kind} case(ctx, {parameters}):\n{text}\n")
        return findings_in(names["case"], Sources())

    return find


TRAPS = [
    # The clock.
    ("W101", "datetime.now(UTC)"),
    ("W101", "dt.now()"),
    ("W101", "dates.datetime.utcnow()"),
    ("W101", "date.today()"),
    ("W101", "timezone.now() + timedelta(days=1)"),
    ("W101", "now()"),
    ("W101", "timezone.localdate()"),
    ("W101", "time.time()"),
    ("W101", "seconds()"),
    ("W101", "time.monotonic_ns()"),
    ("W101", "time.sleep(3)"),
    ("W101", "await asyncio.sleep(3)"),
    ("W101", "import time as t\nt.time()"),
    ("W101", "from datetime import datetime as moment\nmoment.now()"),
    ("W101", "clock = timezone.now\nclock()"),
    ("W101", "def later(): return time.time()\nlater()"),
    ("W101", "helper(ctx)"),
    ("W101", "ctx.parallel({'a': lambda c: c.run(charge, time.time())})"),
    ("W101", "def eu(c): return c.run(charge, time.time())\nctx.parallel({'eu': eu})"),
    ("W101", "ctx.parallel({'a': helper})"),
    ("W101", "ctx.sleep_until(timezone.now() + timedelta(days=1))"),
    ("W101", "ctx.run(charge,\n    1,\n    time.time())"),
    # Steps that are not declared.
    ("W102", "ctx.run(refund, 1)"),
    ("W102", "ctx.run(refund.keyed(1), 1)"),
    ("W102", "ctx.run(charge.named('tip'), 1)"),
    ("W102", "ctx.on_failure(refund, 1)"),
    ("W102", "ctx.run_step('refund', 1)"),
    ("W102", "ctx.parallel({'a': refund.bind(1)})"),
    ("W102", "ctx.parallel({'a': lambda c: c.run(refund)})"),
    ("W102", "undo = refund\nctx.run(undo)"),
    ("W102", "ctx.decide('plan', planned)"),
    ("W102", "ctx.agent_loop('a', model=charge, tools=[ship, refund], messages=[])"),
    ("W102", "ctx.agent_loop('a', model=refund, tools=(ship,), messages=[])"),
    # Chance.
    ("W103", "random.random()"),
    ("W103", "chance.shuffle([])"),
    ("W103", "choice([1])"),
    ("W103", "RNG.random()"),
    ("W103", "random.Random()"),
    ("W103", "secrets.token_hex()"),
    ("W103", "uuid.uuid4()"),
    ("W103", "urandom(4)"),
    ("W103", "os.urandom(4)"),
    # The world.
    ("W104", "Order.objects.filter(pk=1)"),
    ("W104", "Order._default_manager.all()"),
    ("W104", "Order(note='x').save()"),
    ("W104", "order = Order()\norder.save()"),
    ("W104", "from .models import Order as Row\nRow.objects.count()"),
    ("W104", "get_object_or_404(Order, pk=1)"),
    ("W104", "connection.cursor()"),
    ("W104", "if settings.DEBUG: ctx.run(charge)"),
    ("W104", "ctx.run(charge, timeout=settings.DEBUG)"),
    ("W104", "getattr(settings, 'FEE', 1)"),
    ("W104", "from django.conf import settings as s\ns.DEBUG"),
    ("W104", "os.environ['HOME']"),
    ("W104", "environ.get('HOME')"),
    ("W104", "os.getenv('HOME')"),
    ("W104", "cache.get('x')"),
    ("W104", "send_mail('a', 'b', 'c', ['d'])"),
    ("W104", "import httpx\nhttpx.get('x').json()"),
    ("W104", "urllib.request.urlopen('x')"),
    ("W104", "open('x').read()"),
    ("W104", "Path('x').read_text()"),
    ("W104", "subprocess.run(['ls'])"),
    ("W104", "socket.create_connection(('h', 1))"),
    # What runs at each park.
    ("W105", "try:\n    ctx.suspend('A')\nfinally:\n    LOCK.release()"),
    ("W105", "try:\n    x = 1\nexcept StepFailed:\n    ctx.run(charge)\nfinally:\n    ctx.run(ship)"),
    ("W105", "with LOCK:\n    ctx.run(charge)"),
    ("W105", "with LOCK:\n    ctx.agent_loop('a', model=charge, tools=[ship], messages=[])"),
    ("W105", "with transaction.atomic():\n    ctx.run(charge)"),
    ("W105", "async with LOCK:\n    await ctx.receive('m')"),
    ("W105", "try:\n    ctx.sleep(3)\nexcept BaseException:\n    print('left')\n    raise"),
    # What catches a park.
    ("W106", "try:\n    ctx.run(charge)\nexcept:\n    pass"),
    ("W106", "try:\n    ctx.run(charge)\nexcept BaseException:\n    ctx.run(ship)"),
    ("W106", "try:\n    ctx.run(charge)\nexcept (ValueError, BaseException) as exc:\n    print(exc)"),
    ("W106", "with contextlib.suppress(BaseException):\n    ctx.run(charge)"),
    # Calls that are not recorded.
    ("W107", "charge(ctx, 1)"),
    ("W107", "charge.func(ctx, 1)"),
    ("W107", "other(ctx)"),
    ("W107", "other.start()"),
    ("W107", "ctx.run(lambda: 1)"),
    ("W107", "ctx.run(plain, 1)"),
    ("W107", "ctx.run(functools.partial(plain, 1))"),
    ("W107", "def inner(c): return 1\nctx.run(inner)"),
    ("W107", "ctx.run(other)"),
    # Other threads and tasks.
    ("W108", "await asyncio.gather(ctx.run(charge), ctx.run(ship))"),
    ("W108", "await gather(ctx.run(charge))"),
    ("W108", "async with asyncio.TaskGroup() as group:\n    await ctx.run(charge)"),
    ("W108", "asyncio.create_task(ctx.run(charge))"),
    ("W108", "threading.Thread(target=plain).start()"),
    ("W108", "ThreadPoolExecutor().map(plain, [1])"),
    ("W108", "await sync_to_async(plain)(1)"),
    # Sets.
    ("W109", "for sku in {'a', 'b'}: ctx.run(ship.keyed(sku), sku)"),
    ("W109", "for sku in SKUS: ctx.run(ship.keyed(sku), sku)"),
    ("W109", "for n, sku in enumerate(set(ctx.attributes)): ctx.run(ship, sku)"),
    ("W109", "skus = set()\nfor sku in skus: ctx.run(ship.keyed(sku), sku)"),
    ("W109", "[ctx.run(ship, s) for s in {s for s in ctx.attributes}]"),
    ("W109", "for s in list(SKUS - {'a'}): ctx.run(ship, s)"),
]


@pytest.mark.parametrize(("rule", "body"), TRAPS)
def test_a_trap_is_told(findings, rule, body):
    """Once, with its id."""
    assert [finding.id for finding in findings(body)] == [rule]


def test_every_rule_has_a_trap():
    """No id is only on paper."""
    assert {rule for rule, _ in TRAPS} == IDS


SAFE = [
    # The context's own, and plain conversions.
    "ctx.now(); ctx.random().random(); ctx.uuid4()",
    "rng = ctx.random()\nrng.choice([1])",
    "random.Random(4).random()",
    "rng = random.Random(x)\nrng.shuffle([])",
    "datetime.fromisoformat(x); datetime(2024, 1, 1, tzinfo=UTC); timedelta(days=1)",
    "timezone.localtime(ctx.now()); time.gmtime(0)",
    "uuid.UUID(x); uuid.uuid5(uuid.NAMESPACE_URL, x); secrets.compare_digest(x, x)",
    "urllib.parse.quote(x); Path('a') / 'b'; os.path.join('a', 'b')",
    # Names of one's own.
    "random = x\nrandom.choice()",
    "time = ctx.now()\ntime.time()",
    "for cache in x: cache.get('a')",
    "now = x\nnow()",
    "def now(): return 1\nnow()",
    "open = x\nopen()",
    "clock = timezone.now\nclock = x\nclock()",
    "clock = x\nif x: clock = timezone.now\nclock()",
    # Deciders read what they like.
    "ctx.decide('a', lambda: flag('x') and random.random())",
    "ctx.decide('a', lambda: Order.objects.count() + time.time() + settings.FEE)",
    "def read(): return os.environ['HOME']\nctx.decide('a', read)",
    "read = lambda: time.time()\nctx.decide('a', read)",
    "ctx.decide('a', timezone.now)",
    "def rate(): return time.time()\ndef twice(): return 2 * rate()\nctx.decide('a', lambda: twice() + 1)",
    "ctx.decide('a', functools.partial(flag, 'x'))",
    "ctx.decide('a', lambda c: c.run(charge, timezone.now()))",
    "ctx.decide('a', lambda c: helper(c))",
    "ctx.decide('a', helper)",
    # What is recorded with a wait.
    "ctx.sleep(settings.PERIOD)",
    "ctx.suspend('A', timeout=settings.PERIOD)",
    # Steps.
    "ctx.run(charge, 1); ctx.run(ship.keyed(x), 1); ctx.run(charge.named('rest'), 1)",
    "ctx.run(x, 1); ctx.run(x.keyed(1), 1)",
    "ctx.run_step('rest', 1); ctx.run_step('ship#a', 1); ctx.run_step(x, 1)",
    "ctx.parallel({'a': charge.bind(1), 'b': lambda c: c.run(ship)})",
    "ctx.start_child(other); other.using(execution_id=ctx.execution_id + '/next').start()",
    "x(ctx, 1); good_helper(ctx); recursive(ctx)",
    "ctx.parallel({'a': made('a')})",
    "charge = x\ncharge(ctx)",
    # Functions that are handed over and not called.
    "sorted(x, key=lambda row: row.sku)",
    "x(now)",
    # The ORM's names that ask nothing.
    "Order.DoesNotExist; Order._meta.label; x.objects.all(); x.save()",
    "settings; x.settings.DEBUG",
    # Blocks.
    "try:\n    done = x()\nfinally:\n    LOCK.release()\nctx.run(charge)",
    "done = False\ntry:\n    ctx.run(charge)\nfinally:\n    done = True",
    "with LOCK:\n    x = 1\nctx.run(charge)",
    "with contextlib.suppress(StepFailed):\n    ctx.run(charge)",
    "with translation.override('de'), timezone.override(None):\n    ctx.run(charge)",
    "with LOCK:\n    ctx.now()",
    "with LOCK:\n    def branch(ctx): return ctx.run(charge)\nctx.parallel({'a': branch})",
    "try:\n    ctx.run(charge)\nexcept Exception:\n    ctx.run(ship)",
    "try:\n    ctx.run(charge)\nexcept (StepFailed, ChildFailed):\n    ctx.run(ship)",
    "try:\n    x()\nexcept BaseException:\n    pass",
    "try:\n    ctx.run(charge)\nexcept BaseException:\n    raise",
    # Sets that give no order to anything.
    "for sku in sorted(SKUS): ctx.run(ship.keyed(sku), sku)",
    "for sku in SKUS: x.append(sku)",
    "ctx.parallel({s: ship.bind(s) for s in SKUS})",
    "skus = {'a'}\nskus = sorted(skus)\nfor sku in skus: ctx.run(ship.keyed(sku), sku)",
    "[s for s in set(ctx.run(charge))]",
    "for s in {'a': 1}: ctx.run(ship.keyed(s), s)",
    "for s in x - x: ctx.run(ship.keyed(s), s)",
    # Declared inside, and not known to be a part of the body.
    "@tool\ndef inside(ctx): return time.time()",
    "class Inside:\n    made = time.time",
]


@pytest.mark.parametrize("body", SAFE)
def test_what_only_looks_like_a_trap_is_passed_over(findings, body):
    """A false alarm costs more than a miss."""
    assert findings(body, parameters="x=None") == []


def test_a_parameter_that_is_a_set_has_no_order(findings):
    """Its annotation says so."""
    body = "for sku in skus: ctx.run(ship.keyed(sku), sku)"
    assert [finding.id for finding in findings(body, parameters="skus: set[str]")] == ["W109"]
    assert findings(body, parameters="skus: list[str]") == []


@pytest.mark.parametrize(
    ("families", "said"), [("['refund']", []), ("['/refund#x.*/']", []), ("['other']", ["W102"])]
)
def test_a_step_family_declares_steps(findings, families, said):
    """A base by its name; a regular expression may admit any id."""
    found = findings("ctx.run(refund.keyed(1))", options=f"step_families={families}")
    assert [finding.id for finding in found] == said


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("# loom: ok", []),
        ("#loom:ok", []),
        ("# loom: ok, it goes into a log line only", []),
        ("# loom: ok W101 W103", []),
        ("# loom: ok W103", ["W101"]),
        ("# loom: okay", ["W101"]),
        ("# ok", ["W101"]),
    ],
)
def test_a_line_is_silenced(findings, comment, said):
    """Whole, or by an id; the next line is not."""
    assert [finding.id for finding in findings(f"time.time()  {comment}")] == said
    assert [finding.id for finding in findings(f"x = 1  {comment}\ntime.time()")] == ["W101"]


@pytest.mark.parametrize(
    "body",
    [
        "try:\n    ctx.suspend('A')\nfinally:  # loom: ok\n    print()",
        "with LOCK:  # loom: ok\n    ctx.run(charge)",
        "with (\n    LOCK,  # loom: ok\n):\n    ctx.run(charge)",
        "try:\n    ctx.run(charge)\nexcept BaseException:  # loom: ok\n    print()",
        "for s in SKUS:  # loom: ok\n    ctx.run(ship, s)",
    ],
)
def test_a_block_is_silenced_at_its_head(findings, body):
    """Not by a comment on a line inside it."""
    moved = body.replace("  # loom: ok", "") + "  # loom: ok"
    assert findings(body) == []
    if not body.startswith("try:\n    ctx.suspend"):  # there the line inside is the one that is told
        assert len(findings(moved)) == 1


def warned() -> list[checks.CheckMessage]:
    """What manage.py check says of bodies; whatever else a test of this process has declared is its own affair."""
    return [one for one in checks.run_checks(tags=["loom"]) if str(one.id).removeprefix("loom.") in IDS]


def test_a_finding_says_what_where_and_the_way_out(module):
    """As a warning of manage.py check."""
    names = module("\n@flow('lint.case')\ndef case(ctx):\n    return time.time()\n")
    (message,) = warned()
    code = names["case"].func.__code__

    assert message.id == "loom.W101"
    assert message.level == checks.WARNING
    assert message.obj == f"{code.co_filename}:{code.co_firstlineno + 2}"
    assert "time.time()" in message.msg
    assert '"lint.case"' in message.msg
    assert str(message.hint).startswith("Use ctx.now(), ")
    assert "# loom: ok" in str(message.hint)


# Functions of every kind.


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(ctx: FlowContext) -> Any:
        return function(ctx)

    return wrapper


def reads_the_clock(ctx: FlowContext) -> float:
    return time.time()


@pytest.mark.parametrize("decorate", [wrapped, hidden, lambda function: hidden(wrapped(hidden(function)))])
def test_a_decorated_body_is_read(decorate):
    """Through functools.wraps, and through a closure that is given the ctx."""
    found = findings_in(flow("lint.decorated")(decorate(reads_the_clock)), Sources())
    assert [finding.id for finding in found] == ["W101"]


def test_a_closure_is_looked_into():
    """A tool of the function around is known."""

    @tool
    def local(ctx: StepContext) -> None: ...

    @flow("lint.closure")
    def body(ctx: FlowContext) -> None:
        ctx.run(local)

    assert [finding.id for finding in findings_in(body, Sources())] == ["W102"]


class Callable_:
    __name__ = "callable"

    def __call__(self, ctx: FlowContext) -> float:
        return time.time()


def loops_in_its_wrappers(ctx: FlowContext) -> None: ...


loops_in_its_wrappers.__wrapped__ = loops_in_its_wrappers  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "function",
    [Callable_(), lambda ctx: time.time(), loops_in_its_wrappers, functools.partial(reads_the_clock)],
)
def test_what_is_no_plain_function_is_passed_over(function):
    """Silently."""
    declared = flow("lint.plain")(reads_the_clock)
    declared.func = function
    assert findings_in(declared, Sources()) == []


@pytest.mark.parametrize("text", [None, "def broken(:", "x = 1\n", "\0", "def case(ctx):\n" + "(" * 500])
def test_a_source_that_is_not_there_or_broken_is_passed_over(module, text):
    """Code that was typed in, or a file that has changed since."""
    names = module("\n@flow('lint.case')\ndef case(ctx):\n    return time.time()\n")
    file = Path(names["case"].func.__code__.co_filename)
    file.unlink() if text is None else file.write_text(text)
    linecache.checkcache(str(file))

    assert findings_in(names["case"], Sources()) == []
    assert warned() == []


def test_no_lazy_object_is_set_up(module):
    """Looking at a name asks nothing of what it stands for."""
    setup = unittest.mock.Mock(return_value={})
    body = (
        "LAZY.get(LAZY[0]); LAZY(ctx); ctx.run(LAZY); ctx.decide('a', LAZY)\n    for s in LAZY(): ctx.run(s)"
    )
    names = module(f"\n@flow('lint.case')\ndef case(ctx):\n    {body}\n    for s in LAZY: ctx.run(s)\n")
    names["LAZY"] = SimpleLazyObject(setup)

    assert findings_in(names["case"], Sources()) == []
    assert not setup.called


def test_an_oddity_stops_no_command(module, monkeypatch):
    """The checks go on with the other flows."""
    module("\n@flow('lint.case')\ndef case(ctx):\n    return time.time()\n")
    monkeypatch.setattr(sources.Sources, "find", unittest.mock.Mock(side_effect=KeyError))

    assert warned() == []


def test_a_file_is_parsed_once(module, monkeypatch):
    """200 flows of one module are one parse."""
    bodies = "".join(
        f"\n@flow('lint.case{n}', steps=[charge])\ndef case{n}(ctx):\n    ctx.run(charge, {n})\n    helper(ctx)\n"
        for n in range(200)
    )
    module(bodies)
    parse = unittest.mock.Mock(wraps=ast.parse)
    monkeypatch.setattr(ast, "parse", parse)

    found = warned()

    assert len(found) == 200
    assert parse.call_count == 1


def test_the_rules_name_nothing_twice():
    """Each path of a table stands in one row."""
    rows = [*rules.CALLS, *rules.READS]
    assert len(rows) == len(set(rows))


def test_the_flows_of_the_example_are_clean():
    """What a project would copy raises no warning."""
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--tag", "loom", "--fail-level", "WARNING"],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "example_project.settings"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")
