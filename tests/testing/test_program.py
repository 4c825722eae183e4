"""The test that the documentation shows first, as users would write it: an order, an approval, a transfer."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import TestCase, override_settings
from django.urls import path

from loom_django import ResumeRefusedError, loom
from loom_django.testing import crash_sweep, harness
from tests.shop.models import Order
from tests.testing.flows import BankRefusal, BankTimeout, charge, mark_paid, order, refund, wire_transfer


def pay(request: HttpRequest, number: int) -> HttpResponse:
    with transaction.atomic():
        purchase = Order.objects.create(pk=number, customer="anna", amount=Decimal("9.90"))
        order.using(execution_id=f"order-{purchase.pk}", subject=purchase).start(
            purchase.pk, purchase.amount, "DE02"
        )
    return HttpResponse(status=302)


def approve(request: HttpRequest, number: int) -> HttpResponse:
    try:
        loom.resume(f"order-{number}", event_type="Approval", payload={"by": "anna"}, principal="anna")
    except ResumeRefusedError as exc:
        return HttpResponse(str(exc), status=409)
    return HttpResponse(status=302)


urlpatterns = [path("orders/<int:number>/pay/", pay), path("orders/<int:number>/approve/", approve)]


@override_settings(ROOT_URLCONF=__name__)
class OrderTests(TestCase):
    def setUp(self) -> None:
        self.h = self.enterContext(harness())
        self.h.stub(charge, {"id": "ch_1"})
        self.h.stub(refund, None)

    def test_expires_after_two_days(self) -> None:
        """A start in the view's own atomic() is run, and the approval's timeout comes on the moved clock."""
        self.client.post("/orders/1/pay/")
        self.h.run()
        self.h.advance(timedelta(days=2))
        assert order.handle("order-1").result() == "expired"
        assert self.h.calls(refund)[0].args == ("ch_1",)

    def test_a_bank_timeout_asks_a_person(self) -> None:
        """A doubtful transfer parks, and a verdict ends it without a second call."""
        self.h.stub(wire_transfer, raises=BankTimeout())
        handle = order.using(execution_id="o1").start(1, Decimal("9.90"), "DE02")
        self.h.run()
        loom.resume("o1", event_type="Approval", payload={"by": "anna"})
        self.h.run()
        assert self.h.events("o1")[-2:] == ["EFFECT_INDOUBT", "EXECUTION_SUSPENDED"]
        loom.resolve("o1", "wire_transfer", "completed-with-result", output="tx-7", reason="seen at the bank")
        self.h.run()
        assert handle.result() == "paid"
        assert len(self.h.calls(wire_transfer)) == 1

    def test_a_refusal_gives_the_money_back(self) -> None:
        """A known failure is the flow's to handle; the view's answer to a second approval is a conflict."""
        self.h.stub(wire_transfer, raises=BankRefusal("no such account"))
        self.client.post("/orders/2/pay/")
        self.h.run()
        assert self.client.post("/orders/2/approve/").status_code == 302
        self.h.run()
        assert order.handle("order-2").result() == "refused: no such account"
        assert self.client.post("/orders/2/approve/").status_code == 409

    def test_a_rolled_back_start_is_not_there(self) -> None:
        """The execution exists if and only if the purchase does."""
        with transaction.atomic():
            order.using(execution_id="o1").start(1, Decimal("9.90"), "DE02")
            transaction.set_rollback(True)
        self.h.run()
        assert self.h.calls(charge) == []

    def test_the_transactional_step_writes_its_row(self) -> None:
        """A tool that is not stubbed really runs, in the test's transaction."""
        self.h.stub(wire_transfer, "tx-1")
        self.client.post("/orders/3/pay/")
        self.h.run()
        self.client.post("/orders/3/approve/")
        self.h.run()
        assert Order.objects.get(pk=3).paid
        assert self.h.calls(mark_paid)[0].args == (3, "anna")


def scenario(h: Any) -> None:
    h.stub(charge, {"id": "ch_1"})
    h.stub(wire_transfer, "tx-1")
    order.using(execution_id="o1").start(1, Decimal("9.90"), "DE02")
    h.run()
    loom.resume("o1", event_type="Approval", payload={"by": "anna"})
    h.run()


def test_no_crash_doubles_anything(db: None) -> None:
    """Every crash of the order's steps ends as it would have ended, or asks a person."""
    report = crash_sweep(scenario)
    assert report.ok, report
    assert len(report.points) == 15, report


@pytest.mark.django_db(transaction=True)
def test_no_crash_doubles_anything_on_committed_rows() -> None:
    """The same with truncated tables in place of savepoints."""
    report = crash_sweep(scenario, points=["in-effect", "after-effect"])
    assert report.ok, report
    assert len(report.points) == 6, report
