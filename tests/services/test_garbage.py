"""A worker's process collects garbage seldom, and leaves Python as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from loom_django.services.garbage import YOUNG, rare_collections

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_collections_are_rare_meanwhile_and_spare_what_was_there() -> None:
    """What the process has loaded is never looked through again; afterwards all is as before."""
    gc.set_threshold(700, 10, 11)
    frozen = gc.get_freeze_count()
    with rare_collections():
        assert gc.get_threshold() == (YOUNG, 10, 11)
        assert gc.get_freeze_count() > frozen + 10_000
    assert gc.get_threshold() == (700, 10, 11)
    assert gc.get_freeze_count() == 0


def test_what_a_project_has_made_rarer_stands() -> None:
    """A higher threshold is kept, and so is none at all."""
    gc.set_threshold(50_000, 5, 5)
    with rare_collections():
        assert gc.get_threshold() == (50_000, 5, 5)
    gc.set_threshold(0)
    with rare_collections():
        assert gc.get_threshold()[0] == 0
    gc.set_threshold(700)
    gc.disable()
    with rare_collections():
        assert gc.get_threshold()[0] == 700
        assert not gc.isenabled()
