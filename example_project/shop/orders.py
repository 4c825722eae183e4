"""Placing an order: the one place where an execution is started."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction

from example_project.shop.flows import fulfil
from example_project.shop.models import Order, Product


def place(product: Product, *, customer: str, iban: str, return_period: timedelta | None = None) -> Order:
    """Make an order and start what happens to it.

    One transaction: the order, its execution and the piece out of stock. All of it, or nothing.

    Raises:
        IntegrityError: the product is sold out; nothing was made.
    """
    if return_period is None:
        return_period = settings.SHOP_RETURN_PERIOD
    with transaction.atomic():
        order = Order.objects.create(product=product, customer=customer, iban=iban, amount=product.price)
        execution = fulfil.using(execution_id=order.execution_id, subject=order)
        execution.start(order.pk, order.amount, iban, return_period)
        product.take_one()
    return order
