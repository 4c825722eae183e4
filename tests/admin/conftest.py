from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from loom_django.engine.core import NoKeeper
from loom_django.runtime import loom
from loom_django.stores.base import ANY_FLOW, Due, TimerRow
from tests.admin import flows

ACTS = (
    "resolve_step",
    "resume_execution",
    "cancel_execution",
    "retry_error",
    "retry_diverged",
    "recover_execution",
    "move_execution",
    "send_message",
    "fork_execution",
    "rerun_execution",
    "wake_timer",
)
LOOK = ("view_execution", "view_event", "view_payload", "view_timer", "view_lease")


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left of another test; and no thread renews leases, whose connection would outlive the database."""
    monkeypatch.setattr("loom_django.runtime.LeaseKeeper", lambda store, settings: NoKeeper())
    loom.reset()
    flows.bank.clear()
    flows.bugs.clear()
    flows.edits.clear()
    yield
    flows.bank.clear()
    flows.bugs.clear()
    flows.edits.clear()
    loom.reset()


def diverged(execution_id: str) -> None:
    """An execution that is parked since its body was edited, and right again."""
    flows.shifting.using(execution_id=execution_id).start()
    flows.edits.append("dropped a step")
    loom.resume(execution_id, event_type="Go")
    flows.edits.clear()


def make_user(name: str, *permissions: str) -> User:
    """A member of staff with just these permissions of loom."""
    user = User.objects.create_user(name, password="x", is_staff=True)
    found = Permission.objects.filter(content_type__app_label="loom", codename__in=permissions)
    assert found.count() == len(permissions)
    user.user_permissions.set(found)
    return user


def client_of(user: User, **options: Any) -> Client:
    client = Client(**options)
    client.force_login(user)
    return client


@pytest.fixture
def anna(db: None) -> User:
    """May look and do everything."""
    return make_user("anna", *LOOK, *ACTS)


@pytest.fixture
def ben(db: None) -> User:
    """May look, and do nothing."""
    return make_user("ben", *LOOK)


@pytest.fixture
def console(anna: User) -> Client:
    return client_of(anna)


def url(name: str, *args: Any, **query: Any) -> str:
    from urllib.parse import urlencode

    from django.contrib.admin.utils import quote

    address = reverse(f"admin:loom_{name}", args=[quote(str(arg)) for arg in args])
    return f"{address}?{urlencode(query)}" if query else address


def kinds(execution_id: str) -> list[str]:
    return [event.kind for event in loom.history(execution_id)]


def in_doubt(execution_id: str, *args: Any, **kwargs: Any) -> int:
    """Start a payment that ends in doubt; returns the sequence of the question."""
    flows.pay.using(execution_id=execution_id).start(*args, **kwargs)
    return question(execution_id)


def question(execution_id: str, step: str = "transfer") -> int:
    return loom.state(execution_id).frames[step].in_doubt_sequence


def put_off(execution_id: str) -> TimerRow:
    """Have a sleeping execution's wake be due, and held back for ten minutes as after a failure; the row."""
    flows.nap.using(execution_id=execution_id).start(hours=1e-9)
    dues: list[Due] = []
    while not dues:  # a moment away
        dues = loom.store.claim_due(limit=1, hold=600, known=ANY_FLOW, redrive=True)
    return dues[0].row


def verdict(sequence: int, resolution: str = "completed-with-result", **given: Any) -> dict[str, Any]:
    """What the verdict form sends."""
    filled = {"output": '"tx-7"'} if resolution == "completed-with-result" else {}
    return {
        "step": "transfer",
        "question": sequence,
        "resolution": resolution,
        "reason": "seen at the bank",
        "stage": "confirm",
        **filled,
        **given,
    }
