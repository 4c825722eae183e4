"""Some keys of LOOM changed for a test; the others stay."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import SimpleTestCase, override_settings

from loom_django.conf import get_settings
from loom_django.errors import InvalidInputError
from loom_django.testing import override_loom

pytestmark = pytest.mark.once


def test_one_key_and_the_others_stay() -> None:
    """Overrides add up, and each ends with its block."""
    with override_settings(LOOM={"LEASE_TTL": 40}), override_loom(LEASE_RENEW_INTERVAL=timedelta(seconds=2)):
        assert (get_settings().LEASE_TTL, get_settings().LEASE_RENEW_INTERVAL) == (40, 2)
        with override_loom(LEASE_TTL=50):
            assert (get_settings().LEASE_TTL, get_settings().LEASE_RENEW_INTERVAL) == (50, 2)
        assert get_settings().LEASE_TTL == 40
    assert get_settings().LEASE_TTL == 60


@override_loom(READY_GRACE=7)
def test_a_decorated_function() -> None:
    """A test function is decorated as by override_settings."""
    assert get_settings().READY_GRACE == 7


@override_loom(READY_GRACE=7)
@override_loom(POLL_INTERVAL=3)
class DecoratedClassTests(SimpleTestCase):
    def test_the_class_has_both(self) -> None:
        """Decorators of one class add up."""
        assert (get_settings().READY_GRACE, get_settings().POLL_INTERVAL) == (7, 3)

    @override_loom(READY_GRACE=8)
    def test_a_method_changes_one(self) -> None:
        """And those of its methods on top."""
        assert (get_settings().READY_GRACE, get_settings().POLL_INTERVAL) == (8, 3)

    @override_loom(READY_GRACE=9)
    async def test_an_async_method(self) -> None:
        """An async test is decorated alike."""
        assert get_settings().READY_GRACE == 9


@override_loom(MAX_RECOVERIES=3)
class InheritingTests(DecoratedClassTests):
    def test_a_subclass_has_all(self) -> None:
        """What the base class changes stays changed."""
        settings = get_settings()
        assert (settings.READY_GRACE, settings.POLL_INTERVAL, settings.MAX_RECOVERIES) == (7, 3, 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"LEASE_TLL": 3}, "did you mean 'LEASE_TTL'"),
        ({"COLOUR": 3}, "no key 'COLOUR'"),
        ({"LEASE_TTL": 0}, "LOOM\\['LEASE_TTL'\\] must be above 0"),
        ({"DISPATCHER": "celery"}, "must be one of"),
    ],
)
def test_mistakes_are_refused_where_they_stand(keys: dict[str, Any], message: str) -> None:
    """An unknown key would change nothing, silently."""
    with pytest.raises(InvalidInputError, match=message):
        override_loom(**keys)
