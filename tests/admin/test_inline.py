"""The executions of an object on its own admin page, and the ways to find executions by what they are about."""

from __future__ import annotations

import uuid

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse

from loom_django.admin import ExecutionsInlineMixin
from loom_django.admin.inline import ROWS
from loom_django.models import Execution
from tests.admin import flows
from tests.admin.conftest import client_of, in_doubt, make_user, url
from tests.shop.models import Country, Order, Parcel

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class OrderAdmin(ExecutionsInlineMixin, admin.ModelAdmin):
    list_display = ("customer",)


class PlainAdmin(ExecutionsInlineMixin, admin.ModelAdmin):
    pass


site = admin.AdminSite()
for model, of_it in admin.site._registry.items():
    site.register(model, type(of_it))
site.register(Order, OrderAdmin)
site.register([Parcel, Country], PlainAdmin)
bare = admin.AdminSite("bare")  # without the console
bare.register(Order, OrderAdmin)

urlpatterns = [path("admin/", site.urls), path("bare/", bare.urls)]


def page_of(subject, space: str = "admin") -> str:
    meta = subject._meta
    return reverse(f"{space}:{meta.app_label}_{meta.model_name}_change", args=[subject.pk])


@pytest.fixture
def clerk(db):
    """May change what the shop has, and look at executions."""
    user = make_user("clerk", "view_execution")
    user.user_permissions.add(*Permission.objects.filter(content_type__app_label="shop"))
    return client_of(user)


@pytest.fixture
def order(db):
    return Order.objects.create(customer="Eve", amount=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Order.objects.create(customer="Eve", amount=1),
        lambda: Parcel._default_manager.create(id=uuid.UUID(int=7)),
        lambda: Country._default_manager.create(code="d:e/1 ä"),
    ],
    ids=["int", "uuid", "text"],
)
def test_an_object_shows_its_executions(clerk, make):
    """Of any kind of key; those of another object, or of none, are not among them."""
    subject = make()
    flows.ask.using(execution_id="mine", subject=subject).start()
    flows.ask.using(execution_id="other").start()
    text = clerk.get(page_of(subject)).content.decode()
    assert f'href="{url("execution_change", "mine")}"' in text
    assert "Approval" in text
    assert url("execution_change", "other") not in text
    assert list(Execution.objects.for_subject(subject).values_list("pk", flat=True)) == ["mine"]


def test_an_object_with_many_executions_shows_the_newest(clerk, order):
    """Ten of them in one query, and a link to all, which is the list of these."""
    for number in range(ROWS + 2):
        flows.ask.using(execution_id=f"x-{number:02}", subject=order).start()
    in_doubt("other")
    with CaptureQueriesContext(connection) as caught:
        text = clerk.get(page_of(order)).content.decode()
    assert sum("loom_execution" in query["sql"] for query in caught) == 1
    assert [f"x-{number:02}" in text for number in range(ROWS + 2)] == [False, False] + [True] * ROWS
    address = f"{reverse('admin:loom_execution_changelist')}?subject=shop.order%3A{order.pk}"
    assert f'href="{address}"' in text
    found = clerk.get(address)
    assert found.context["cl"].result_count == ROWS + 2
    assert f"shop.order {order.pk}" in found.content.decode()  # the filter says what it does


def test_an_execution_leads_to_its_object(clerk, order, ben):
    """For those who may look at it; its attributes stand beside it."""
    flows.ask.using(execution_id="x", subject=order, attributes={"country": "DE"}).start()
    link = f'href="{page_of(order)}"'
    assert link in clerk.get(url("execution_change", "x")).content.decode()
    text = client_of(ben).get(url("execution_change", "x")).content.decode()
    assert link not in text
    assert f"shop.order {order.pk}" in text
    assert "&quot;country&quot;: &quot;DE&quot;" in text


def test_few_executions_need_no_list(clerk, order):
    """No link leads to what is shown already; and none says so."""
    assert "None was started for this object" in clerk.get(page_of(order)).content.decode()
    flows.ask.using(execution_id="x", subject=order).start()
    assert "?subject=" not in clerk.get(page_of(order)).content.decode()


def test_executions_are_shown_to_those_who_may_see_them(order):
    """Without the permission the page is as it is without the mixin."""
    flows.ask.using(execution_id="x", subject=order).start()
    user = make_user("clerk")
    user.user_permissions.add(*Permission.objects.filter(content_type__app_label="shop"))
    text = client_of(user).get(page_of(order)).content.decode()
    assert "loom-executions" not in text
    assert 'name="customer"' in text


@pytest.mark.parametrize("extra", [{}, {"loom_executions-TOTAL_FORMS": "3", "loom_executions-0-id": "x"}])
def test_a_save_of_the_object_leaves_executions_alone(clerk, order, extra):
    """Whatever is posted: the object is saved, nothing else is."""
    flows.ask.using(execution_id="x", subject=order).start()
    before = Execution.objects.values().get(pk="x")
    sent = {"customer": "Mallory", "amount": "2", **extra}
    assert clerk.post(page_of(order), sent).status_code == 302
    order.refresh_from_db()
    assert order.customer == "Mallory"
    assert Execution.objects.values().get(pk="x") == before
    assert clerk.get(reverse("admin:shop_order_add")).status_code == 200


def test_a_site_without_the_console_shows_ids(clerk, order):
    """There is no page to link."""
    flows.ask.using(execution_id="x", subject=order).start()
    text = clerk.get(page_of(order, "bare")).content.decode()
    assert '<th scope="row">x</th>' in text


def test_an_object_that_is_not_saved_has_no_executions(db):
    """None, and no row whose subject is the text None."""
    assert Execution.objects.for_subject(Order()).count() == 0


@pytest.mark.parametrize(
    ("term", "found"),
    [
        ("country=DE", {"a"}),
        (" country = DE ", {"a"}),
        ("size=17", {"a", "b"}),
        ("size=1", set()),
        ("vip=true", {"b"}),
        ("a__b=x", {"b"}),
        ("nothing=DE", set()),
        ("x=y", {"x=y"}),  # an id, too
    ],
)
def test_executions_are_found_by_an_attribute(console, term, found):
    """As a person types it: a number is the number or the text."""
    flows.ask.using(execution_id="a", attributes={"country": "DE", "size": 17}).start()
    flows.ask.using(
        execution_id="b", attributes={"country": "FR", "size": "17", "vip": True, "a__b": "x"}
    ).start()
    flows.ask.using(execution_id="x=y").start()
    page = console.get(url("execution_changelist", q=term))
    assert {row.pk for row in page.context["cl"].result_list} == found
