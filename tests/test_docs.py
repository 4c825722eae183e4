"""What the documentation says is there, and what is there the documentation says."""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import pytest
from django.core.management import get_commands, load_command_class
from django.db import transaction
from django.dispatch import Signal

import loom_django
from loom_django import checks, conf, definitions, errors, lint, loom, models, signals
from loom_django.engine.context import AsyncFlowContext, FlowContext, StepContext
from loom_django.kernel.events import Kind
from loom_django.querysets import ExecutionQuerySet
from loom_django.runtime import Handle, Loom
from loom_django.statuses import ExecutionStatus
from tests.shop.models import Order

once = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")} - set(DOCS.glob("_build/**/*"))
)


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


def missing(names: Iterator[str] | set[str] | list[str], text: str) -> list[str]:
    """The names that the text does not have as a word of its own."""
    return sorted(name for name in names if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text))


# Everything that the code has is in the reference.


@once
def test_every_setting_is_in_the_reference():
    """Each key of LOOM has its row, with its default."""
    text = page("settings")
    for key in conf.KEYS:
        default = getattr(conf.LoomSettings(), key)
        if isinstance(default, str | dict):
            shown = json.dumps(default).replace("null", "None")
        else:
            shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert f"| `{key}` | `{shown}` |" in text


@once
def test_every_check_is_in_the_reference():
    """Each id that the code can report, and no other one."""
    used = set(re.findall(r'id="(loom\.[EW]\d{3})"', inspect.getsource(checks)))
    used |= {f"loom.{rule}" for rule in lint.IDS}

    assert used == set(re.findall(r"^\| `(loom\.[EW]\d{3})`", page("checks"), re.M))


@once
def test_every_command_is_in_the_reference():
    """Each command with each of its own options."""
    text = page("commands")
    for name in sorted(name for name, app in get_commands().items() if app == "loom_django"):
        heading = f"## {name}\n"
        assert heading in text
        section = text.partition(heading)[2].partition("\n## ")[0]
        parser = load_command_class("loom_django", name).create_parser("manage.py", name)
        words = {word for action in parser._actions for word in action.option_strings}
        options = {word for word in words if word.startswith("--")}
        assert missing(options - DJANGOS_OWN, section) == [], name


DJANGOS_OWN = {
    "--help", "--version", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color",
    "--force-color", "--skip-checks",
}  # fmt: skip


@once
def test_every_error_is_in_the_reference():
    """Each class with its code and the attributes that it carries."""
    rows = {
        cells[1].strip(" `").split("`")[0]: cells[2].strip(" `")
        for cells in (line.split("|") for line in page("errors").splitlines())
        if len(cells) == 6
    }
    expected = {
        name: cls.code
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.LoomError) and cls is not errors.LoomError
    }

    assert {name: code for name, code in rows.items() if name in expected} == expected
    assert missing(list(get_args(errors.RefusalReason)), page("loom")) == []


@once
def test_every_signal_is_in_the_reference():
    """Each signal of the public module."""
    names = [name for name, value in vars(signals).items() if isinstance(value, Signal)]

    assert missing(names, page("signals")) == []


@once
def test_every_kind_of_event_is_in_the_reference():
    """Each kind of the kernel has its row."""
    rows = re.findall(r"^\| `([A-Z_]+)` \| (?:yes|no) \|", page("events"), re.M)

    assert sorted(rows) == sorted(Kind)


@once
def test_every_permission_is_in_the_reference():
    """Those that Django makes from the models, and no other ones."""
    meta = [
        model._meta for model in vars(models).values() if inspect.isclass(model) and hasattr(model, "_meta")
    ]
    expected = {
        f"loom.{codename}"
        for options in meta
        if not options.abstract
        for codename in (
            *(f"{action}_{options.model_name}" for action in options.default_permissions),
            *(codename for codename, _ in options.permissions),
        )
    }

    assert expected == set(re.findall(r"^\| `(loom\.\w+)`", page("permissions"), re.M))


@once
def test_every_public_name_is_in_the_reference():
    """What the package exports, and what contexts, handles and loom can do."""
    text = "\n".join(path.read_text() for path in REFERENCE.glob("*.md"))

    assert missing(list(loom_django.__all__), text) == []
    assert (
        missing(public(FlowContext) | public(AsyncFlowContext) | public(StepContext), page("context")) == []
    )
    assert missing(own(ExecutionQuerySet) | {str(status) for status in ExecutionStatus}, page("models")) == []
    twins = {name for name in public(Loom) if name[0] == "a" and name[1:] in public(Loom)}
    assert missing(public(Loom) - twins - INTERNAL, page("loom")) == []
    assert missing(public(Handle), page("loom")) == []


# What services and tests need of the runtime; no program calls it.
INTERNAL = {"reset", "engine", "store", "dispatcher", "in_body", "start_flow", "astart_flow"}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def own(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@once
@pytest.mark.parametrize(("function", "name"), [(definitions.tool, "tool"), (definitions.flow, "flow")])
def test_every_option_of_a_declaration_is_in_the_reference(function, name):
    """Each option of @tool and @flow has its row."""
    documented = inspect.getdoc(function) or ""
    options = re.findall(r"^    (\w+): ", documented.partition("Args:")[2].partition("Raises:")[0], re.M)

    assert len(options) >= 7
    assert missing(options, page("declare").partition(f"## `@{name}`")[2].partition("\n## ")[0]) == []


@once
def test_the_crash_table_is_complete():
    """Five points, four kinds of tool, and the page tells of the same points."""
    with (DOCS / "explanation" / "crash_table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    points = ["before-start", "before-effect", "in-effect", "after-effect", "after-outcome"]
    kinds = ["idempotent", "not-idempotent", "undeclared", "transactional"]

    assert [(row["point"], row["kind"]) for row in rows] == [
        (point, kind) for point in points for kind in kinds
    ]
    promises = (DOCS / "explanation" / "promises.md").read_text()
    assert [point for point in points if f"| `{point}`: " not in promises] == []
    for row in rows:
        assert set(row["log_after_recovery"].split()) <= set(Kind)
        # The promise of the middle column, whatever else the table says.
        assert row["kind"] != "not-idempotent" or int(row["effect_runs"]) <= 1


@once
def test_the_edit_table_is_what_the_page_shows():
    """The page has each edit of the file, under each guard; an execution's state makes no difference."""
    with (DOCS / "explanation" / "edit_table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    versioning = (DOCS / "explanation" / "versioning.md").read_text()

    assert {(row["parked"], row["sleeping"]) == (row["running"],) * 2 for row in rows} == {True}
    for edit in dict.fromkeys(row["edit"] for row in rows):
        guarded = {row["guard"]: row for row in rows if row["edit"] == edit}
        cells = [guarded[guard]["running"] for guard in ("fingerprint", "off", "warn", "fail")]
        told = [edit, guarded["off"]["hash"], guarded["off"]["fingerprint"], *cells]
        assert f"| {' | '.join(told)} |" in versioning


@once
def test_the_supported_versions_agree():
    """README, SECURITY and the package's metadata name the same versions."""
    metadata = (ROOT / "pyproject.toml").read_text()
    djangos = re.findall(r"Framework :: Django :: ([\d.]+)", metadata)
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", metadata)
    readme = (ROOT / "README.md").read_text()
    security = (ROOT / "SECURITY.md").read_text()

    assert f"Django {', '.join(djangos[:-1])} and {djangos[-1]};" in readme
    assert f"Python {pythons[0]} to {pythons[-1]};" in readme
    assert ", ".join(djangos) in security
    assert f"{pythons[0]}–{pythons[-1]}" in security
    assert "PostgreSQL 15 to 18" in readme
    assert "15–18" in security


@once
def test_the_readme_names_the_two_commands():
    """Scripts look for these lines."""
    readme = (ROOT / "README.md").read_text()

    assert re.search(r"^    make demo\b", readme, re.M)
    assert re.search(r"^    make test\b", readme, re.M)


# Every piece of Python compiles, every link leads somewhere, and the main programs run.


def fenced(path: Path) -> Iterator[tuple[str, str]]:
    """Each fenced block: what stands behind its opening, and its text."""
    head: str | None = None
    body: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("```") and head is None:
            head, body = line[3:], []
        elif line == "```" and head is not None:
            yield head, "\n".join(body)
            head = None
        else:
            body.append(line)


def blocks(path: Path) -> list[str]:
    """The blocks of Python; captions go."""
    return [
        re.sub(r"^(:\w+:.*\n)+\n", "", body)
        for head, body in fenced(path)
        if head in ("python", "{code-block} python")
    ]


@once
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_in_the_documentation_compiles(path):
    """No example has a syntax error."""
    for block in blocks(path):
        # Pieces of a function's body are shown without its head.
        piece = re.search(r"^(    )*return\b", block, re.M) and not block.startswith(
            ("from", "@", "def", "import")
        )
        source = f"def body(ctx):\n{textwrap.indent(block, '    ')}" if piece else block
        compile(source, "<example>", "exec")


@once
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(path):
    """Sphinx sees those inside docs/; this sees README and changelog too."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose)

    assert [target for target in targets if not (path.parent / target).exists()] == []


@once
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_promises_exactly_once_alone(path):
    """It is exactly once with respect to the log, and says so."""
    text = re.sub(r"\s+", " ", path.read_text()).replace("-", " ").lower()
    said = re.findall(r"exactly once(.{0,40})", text)

    assert [after for after in said if not re.match(r" with respect to the log|.*same database", after)] == []


@pytest.fixture
def example(monkeypatch) -> Iterator[dict[str, Any]]:
    """The README's flow, with a shop around it."""
    calls: list[tuple[Any, ...]] = []
    shop = types.ModuleType("shop")
    shop.payments = types.SimpleNamespace(  # type: ignore[attr-defined]  # a module made for this test
        charge=lambda *args, **kwargs: calls.append((*args, kwargs)) or "charge-1"
    )
    shop.bank = types.SimpleNamespace(  # type: ignore[attr-defined]
        transfer=lambda *args: calls.append(args) or "transfer-1"
    )
    shop_models = types.ModuleType("shop.models")
    shop_models.Order = Order  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setitem(sys.modules, "shop.models", shop_models)
    flow_block, view_block = blocks(ROOT / "README.md")[:2]
    module = types.ModuleType("readme")
    exec(compile(flow_block, "README.md", "exec"), module.__dict__)  # noqa: S102  the example itself
    yield {"module": module, "view": view_block, "calls": calls}
    definitions.registry.forget("order")


@pytest.mark.django_db(transaction=True)
def test_the_example_of_the_readme_runs(example):
    """From the purchase to the end, with the key that the text promises."""
    start, resume = example["view"].split("# Two days later")
    names = {**vars(example["module"]), "transaction": transaction, "loom": loom, "Decimal": Decimal}
    exec(compile(start, "README.md", "exec"), names)  # noqa: S102
    execution_id = f"order-{names['purchase'].pk}"
    handle = loom.handle(execution_id)
    assert [wait.on for wait in handle.waits] == ["Approval"]

    exec(compile("#" + resume, "README.md", "exec"), names)  # noqa: S102

    assert handle.result() == "paid, approved by anna"
    assert Order.objects.get().paid
    pk = names["purchase"].pk
    assert example["calls"] == [
        (pk, Decimal("9.90"), {"idempotency_key": f"{execution_id}:charge"}),
        ("DE02", Decimal("9.90")),
    ]


# The tutorial, played as it is written.

PLAY = """
import os, sys
from django.test import Client
from django.core.management import call_command
from django.contrib.auth.models import User
from loom_django import loom
from shop import providers
from shop.models import Order

class Killed(BaseException):
    pass

def die(seconds):
    raise Killed("in the bank, after the money has moved")

anna = User.objects.create_superuser("anna", password="pw")
client = Client(SERVER_NAME="localhost")
assert client.post("/buy/", {"customer": "Ada"}).status_code == 302
call_command("run_loom_worker", "--once")
assert "waits for Approval" in client.get("/").content.decode()
assert providers.LEDGER.read_text() == "card charged 9.90 under order-1:charge\\n"
client.force_login(anna)
assert client.post("/approve/1/").status_code == 302
providers.time.sleep, real = die, providers.time.sleep
call_command("run_loom_worker", "--once")
providers.time.sleep = real
assert "waits for EffectInDoubtResolved" in client.get("/").content.decode()
assert client.post("/approve/1/").status_code == 409
queue = client.get("/admin/loom/execution/in-doubt/").content.decode()
assert "order-1:transfer" in queue and "Give a verdict" in queue
address = "/admin/loom/execution/order-1/verdict/?step=transfer"
form = client.get(address).content.decode()
assert "It happened: I give its result below." in form and "The step returns: str" in form
given = {"step": "transfer", "question": "7", "resolution": "completed-with-result",
         "output": '"transfer-1"', "reason": "seen in the bank's ledger"}
assert "Confirm: Verdict" in client.post(address, given | {"stage": "preview"}).content.decode()
assert client.post(address, given | {"stage": "confirm"}).status_code == 302
call_command("run_loom_worker", "--once")
assert Order.objects.get().state == "paid, approved by anna"
assert [wait.on for wait in loom.handle("order-1").waits] == ["__loom_timer__"]
call_command("loom_verify")
call_command("loom_history", "order-1")
print([event.kind for event in loom.history("order-1")])
"""


def unpack(folder: Path) -> None:
    """Write the tutorial's files; what it adds to the settings goes to their end."""
    for head, text in fenced(DOCS / "tutorial.md"):
        if not head.startswith("{code-block}"):
            continue
        caption, _, body = text.partition("\n\n")
        name = caption.removeprefix(":caption: ")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if name == "mysite/settings.py" else ""
        path.write_text(f"{before}\n{body}\n")


@once
def test_the_tutorial_can_be_followed(tmp_path):
    """From the empty project to the sleep; the kill is an exception here, real kills are in the crash tests."""

    def run(*command: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
        environment |= {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "django", "startproject", "mysite", ".")
    run("manage.py", "startapp", "shop")
    unpack(tmp_path)
    run("manage.py", "makemigrations", "shop")
    run("manage.py", "migrate")
    run("manage.py", "check")
    said = run("manage.py", "shell", "-c", PLAY)

    shown = re.findall(r"^\d+ ([A-Z_]+)$", (DOCS / "tutorial.md").read_text(), re.M)
    assert said.strip().splitlines()[-1] == str(shown[:12])
