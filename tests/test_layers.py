"""The borders that an import linter cannot see: what the kernel may touch, and what an import may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

PACKAGE = Path(__file__).resolve().parent.parent / "loom_django"
KERNEL = sorted((PACKAGE / "kernel").rglob("*.py"))
CRONITER = {PACKAGE / "kernel" / "cron.py"}

FORBIDDEN_MODULES = {
    "asyncio",
    "django",  # a pure kernel runs anywhere
    "logging",
    "multiprocessing",
    "os",
    "random",  # what it needs of chance is handed in
    "secrets",
    "socket",
    "sqlite3",
    "subprocess",
    "threading",
    "time",  # time enters as recorded facts only
    "urllib",
}
FORBIDDEN_CALLS = {"input", "now", "open", "print", "today", "urandom", "utcnow", "uuid1", "uuid4"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name


def impurities(source: str) -> set[str]:
    tree = ast.parse(source)
    roots = {name.partition(".")[0] for name in imported(tree)}
    return (roots & FORBIDDEN_MODULES) | (set(called(tree)) & FORBIDDEN_CALLS)


@pytest.mark.parametrize("path", KERNEL, ids=lambda path: path.stem)
def test_the_kernel_is_pure(path):
    """No Django, no I/O, no clock and no chance: the same log folds to the same state everywhere."""
    assert impurities(path.read_text()) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from django.utils import timezone", {"django"}),
        ("import os.path", {"os"}),
        ("def f():\n    import time", {"time"}),  # hidden in a function
        ("datetime.datetime.now(UTC)", {"now"}),
        ("moment.astimezone(UTC)", set()),
        ("from loom_django.kernel import events", set()),
        ("open('x')", {"open"}),
    ],
)
def test_an_impurity_is_found(source, found):
    """The test above would see what it looks for."""
    assert impurities(source) == found


def test_croniter_has_one_importer():
    """What croniter parses and refuses is known in one place."""
    importers = {
        path for path in PACKAGE.rglob("*.py") if "croniter" in set(imported(ast.parse(path.read_text())))
    }

    assert importers <= CRONITER


def test_the_package_is_imported_without_settings_and_without_models():
    """`import loom_django` works before apps are ready, in a settings module too."""
    program = (
        "import sys, loom_django\n"
        "for name in getattr(loom_django, '__all__', []): getattr(loom_django, name)\n"
        "from django.conf import settings\n"
        "assert not settings.configured, 'settings were read'\n"
        "loaded = [name for name in sys.modules if name.startswith('loom_django') and name.endswith('.models')]\n"
        "assert not loaded, loaded\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_no_submodule_is_named_as_a_public_object():
    """Importing a submodule would replace the object of the same name on the package."""
    program = (
        "import loom_django, pkgutil\n"
        "names = {module.name for module in pkgutil.iter_modules(loom_django.__path__)}\n"
        "print(*sorted(names & set(getattr(loom_django, '__all__', []))))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent
    )

    assert done.stdout.split() == []
    assert done.returncode == 0, done.stderr
