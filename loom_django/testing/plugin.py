"""The pytest fixture; pytest finds it by itself where loom_django is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from loom_django.testing.harnessing import Harness


@pytest.fixture
def loom_harness(db: Any) -> Iterator[Harness]:
    """A harness that is entered for the test, on pytest-django's ``db`` (or ``transactional_db``, if asked for)."""
    # Imported here: pytest reads this module at its start, before there are settings.
    from loom_django.testing.harnessing import harness

    with harness() as entered:
        yield entered
