"""The fixture is found by pytest, and finding it costs a session nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from loom_django import testing

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_tells_pytest_of_its_plugin() -> None:
    """The entry point names the module that holds the fixture."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"loom_django": "loom_django.testing.plugin"}


def test_the_plugin_is_read_before_there_are_settings() -> None:
    """pytest imports it in every session, also in those of projects without Django."""
    program = (
        "import sys, loom_django.testing.plugin\n"
        "from django.conf import settings\n"
        "assert not settings.configured\n"
        "heavy = [name for name in sys.modules if name.startswith(('django.test', 'loom_django.testing.h'))]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_is_there() -> None:
    """The table of places holds each name once, and no place is named as an object."""
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
    places = {path.stem for path in (ROOT / "loom_django/testing").glob("*.py")}
    assert not places & set(testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'harnes'"):
        testing.harnes  # noqa: B018  looked up to fail
