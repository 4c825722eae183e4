"""What happens to an order, from the click to the end of the return period.

This is the whole of it: plain functions. loom_django finds this module because the app is installed, as Django's
admin finds ``admin.py``.
"""

from __future__ import annotations

import time
from datetime import timedelta
from decimal import Decimal

from django.db.models import Sum

from example_project.provider import client
from example_project.provider.client import ProviderSilent, ProviderUnreachable
from example_project.shop.models import Booking, Order, Product
from loom_django import FlowContext, RetryPolicy, StepContext, StepFailed, WaitTimedOut, flow, schedule, tool

# Above this, a person has to look at an order first.
APPROVAL_FROM = Decimal(500)


# The provider knows keys: asking it twice moves the money once, so this may be repeated after a crash.
@tool(idempotent=True, retry=RetryPolicy(max_attempts=5, retry_on=(ProviderUnreachable, ProviderSilent)))
def charge(ctx: StepContext, order_id: int, amount: Decimal) -> str:
    return client.charge(f"order {order_id}", amount, key=ctx.idempotency_key)


@tool(idempotent=True, retry=RetryPolicy(max_attempts=5, retry_on=(ProviderUnreachable, ProviderSilent)))
def refund(ctx: StepContext, order_id: int, amount: Decimal) -> str:
    return client.refund(f"order {order_id}", amount, key=ctx.idempotency_key)


# The bank does not: whatever is sent twice is paid twice. So when nobody can know whether it was sent, this is
# never repeated; the execution stops there and asks a person.
@tool(idempotent=False, in_doubt_on=(ProviderSilent,))
def wire_transfer(ctx: StepContext, order_id: int, iban: str, amount: Decimal) -> str:
    return client.transfer(f"order {order_id}", iban, amount, key=ctx.idempotency_key)


# The rows below and the note "this step is done" are one commit: both are there, or neither is.
@tool(transactional=True)
def mark_paid(ctx: StepContext, order_id: int, transfer_id: str) -> None:
    order = Order.objects.get(pk=order_id)
    order.state, order.transfer_id = Order.State.PAID, transfer_id
    order.save()
    Booking.objects.create(order=order, amount=order.amount, text=f"seller paid by {transfer_id}")


@tool(transactional=True)
def mark_refused(ctx: StepContext, order_id: int) -> None:
    Order.objects.filter(pk=order_id).update(state=Order.State.REFUSED)


@tool(transactional=True)
def close_order(ctx: StepContext, order_id: int) -> None:
    Order.objects.filter(pk=order_id).update(state=Order.State.CLOSED)


@flow("order", steps=[charge, refund, wire_transfer, mark_paid, mark_refused, close_order])
def fulfil(ctx: FlowContext, order_id: int, amount: Decimal, iban: str, return_period: timedelta) -> str:
    if amount >= APPROVAL_FROM:
        try:
            ctx.suspend("Approval", timeout=timedelta(days=2))
        except WaitTimedOut:
            ctx.run(mark_refused, order_id)
            return "nobody approved it"
    ctx.run(charge, order_id, amount)
    try:
        transfer_id = ctx.run(wire_transfer, order_id, iban, amount)
    except StepFailed as refusal:  # the bank said no: a known failure. A doubtful one never gets here.
        ctx.run(refund, order_id, amount)
        ctx.run(mark_refused, order_id)
        return f"refused: {refusal.message}"
    ctx.run(mark_paid, order_id, transfer_id)
    ctx.sleep(return_period)  # a row in the database, not a process that waits
    ctx.run(close_order, order_id)
    return f"paid by {transfer_id}"


# Long work, so that the console has something to show that is running. Counting twice harms nobody.
@tool(idempotent=True)
def count_shelf(ctx: StepContext, product_id: int, seconds: float) -> int:
    product = Product.objects.get(pk=product_id)
    time.sleep(seconds)
    return product.stock


@flow("stocktaking", steps=[count_shelf])
def stocktaking(ctx: FlowContext, product_id: int, seconds: float) -> int:
    return ctx.run(count_shelf, product_id, seconds)


@tool(idempotent=True)
def add_up_bookings(ctx: StepContext) -> Decimal:
    return Booking.objects.aggregate(total=Sum("amount"))["total"] or Decimal(0)


@flow("yearly-accounts", steps=[add_up_bookings])
def yearly_accounts(ctx: FlowContext) -> Decimal:
    return ctx.run(add_up_bookings)


# Once a year, by the wall clock of the shop. If nobody was there on New Year's morning, as soon as somebody is.
schedule(
    "yearly-accounts", flow=yearly_accounts, cron="0 3 1 1 *", time_zone="Europe/Berlin", catch_up="latest"
)
