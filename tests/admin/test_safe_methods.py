"""A link never acts: safe methods write nothing, and a POST needs its token."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from loom_django.models import Event, Execution, Fence, Timer
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import client_of, in_doubt, question, url, verdict

pytestmark = pytest.mark.django_db(transaction=True)


def every_address() -> list[str]:
    """All that the app adds to the admin site, with an execution for each thing to do."""
    addresses = [reverse("admin:app_list", args=["loom"])]
    for model, model_admin in admin.site._registry.items():
        if model._meta.app_label != "loom":
            continue
        for pattern in model_admin.get_urls():
            if not pattern.name:
                continue
            if "object_id" in str(pattern.pattern):
                addresses += [
                    url(pattern.name.removeprefix("loom_"), pk) for pk in ("doubt", "ask", "bug", "nap")
                ]
            else:
                addresses.append(reverse(f"admin:{pattern.name}"))
    return addresses


def prepare() -> None:
    in_doubt("doubt")
    flows.ask.using(execution_id="ask").start()
    flows.bugs.append(ValueError("bug"))
    flows.buggy.using(execution_id="bug").start()
    flows.nap.using(execution_id="nap").start()


def rows() -> list[object]:
    return [
        sorted(map(str, model._base_manager.values_list()))
        for model in (Event, Execution, Fence, Timer, LogEntry)
    ]


@pytest.mark.parametrize("method", ["get", "head"])
def test_safe_methods_write_nothing(method, console):
    """Every address that the app adds, for every kind of wait."""
    prepare()
    addresses, before = every_address(), rows()
    assert len(addresses) > 30
    for address in addresses:
        answer = getattr(console, method)(address, {"step": "transfer", "stage": "confirm", "reason": "r"})
        assert answer.status_code < 500, address
        assert rows() == before, address


def test_every_act_needs_the_token(anna):
    """A form of somebody else's page is refused by Django, and nothing is written."""
    prepare()
    before = rows()
    client = client_of(anna, enforce_csrf_checks=True)
    sent = {**verdict(question("doubt")), "payload": "1"}
    for address in every_address():
        assert client.post(address, sent).status_code in (403, 405), address
    assert rows() == before


def test_a_form_has_its_token(anna):
    """With the token that the form carries, the same POST is taken."""
    sequence = in_doubt("doubt")
    client = client_of(anna, enforce_csrf_checks=True)
    page = client.get(url("execution_verdict", "doubt", step="transfer"))
    token = str(page.context["csrf_token"])
    sent = {**verdict(sequence), "csrfmiddlewaretoken": token}
    assert client.post(url("execution_verdict", "doubt"), sent).status_code == 302
    assert loom.state("doubt").result == "tx-7"


@pytest.mark.parametrize("method", ["put", "patch", "delete"])
def test_other_methods_are_refused(method, console):
    """Neither pages nor acts know them."""
    in_doubt("doubt")
    for name in ("execution_change", "execution_verdict", "execution_cancel"):
        assert getattr(console, method)(url(name, "doubt")).status_code == 405
