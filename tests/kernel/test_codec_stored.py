"""The codec on the stored form: what a database gives back is what went in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from loom_django import conf
from loom_django.kernel import codec
from loom_django.kernel.events import Encoded, Event, pack
from loom_django.kernel.fold import fold
from loom_django.kernel.projection import project
from loom_django.stores import store_for
from loom_django.stores.base import READY, Commit, NewExecution
from tests.kernel.test_codec import same, values

numbers = itertools.count(1)


@pytest.mark.django_db
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values)
def test_a_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    """Input, result and every payload go through this column on both databases."""
    execution_id = f"codec-{next(numbers)}"
    fields = {"at": 1, "flow": "f", "version": 1, "input": Encoded(codec.dumps(value))}
    event = Event(execution_id, 1, "EXECUTION_STARTED", pack(fields), writer=1)
    store = store_for(conf.get_settings().DATABASE)
    new = NewExecution(chain=execution_id)
    store.append(Commit(execution_id, (event,), project(fold([event])), ownership=READY, new=new))
    stored = store.read(execution_id)[0]
    assert stored.body == event.body
    assert same(codec.decode(stored.data["input"]), value)
