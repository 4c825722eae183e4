"""A shop with something in every state, for ``make serve``. Seeding twice makes nothing twice."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

from example_project.provider.server import CLOSED_ACCOUNT, GOOD_ACCOUNT, SILENT_ACCOUNT
from example_project.shop import orders
from example_project.shop.flows import stocktaking
from example_project.shop.models import Order, Product
from loom_django import loom

PRODUCTS = {"Hand loom": ("49.00", 40), "Table loom": ("249.00", 12), "Floor loom": ("1890.00", 3)}
A_DAY = 86_400.0

# Customer, product, the seller's account, the return period: what becomes of the order is in the name.
ORDERS = (
    ("Ada, who waits for nothing", "Hand loom", GOOD_ACCOUNT, timedelta(0)),
    ("Bea, who may still return it", "Table loom", GOOD_ACCOUNT, None),
    ("Cem, whose seller's bank went silent", "Table loom", SILENT_ACCOUNT, None),
    ("Dora, whose seller's account is closed", "Hand loom", CLOSED_ACCOUNT, None),
    ("Emil, whose order needs an approval", "Floor loom", GOOD_ACCOUNT, None),
)


def seed() -> None:
    """Fill the shop, unless it has been filled."""
    products = {
        name: Product.objects.get_or_create(name=name, defaults={"price": Decimal(price), "stock": stock})[0]
        for name, (price, stock) in PRODUCTS.items()
    }
    if Order.objects.exists():
        return
    for customer, product, iban, return_period in ORDERS:
        orders.place(products[product], customer=customer, iban=iban, return_period=return_period)
    changed_mind = orders.place(
        products["Floor loom"], customer="Fay, who changed her mind", iban=GOOD_ACCOUNT
    )
    loom.cancel(changed_mind.execution_id, reason="the customer changed her mind", principal="seed")
    stocktaking.using(execution_id="stocktaking-done").start(products["Hand loom"].pk, 0.0)
    stocktaking.using(execution_id="stocktaking-under-way").start(products["Hand loom"].pk, A_DAY)
    stocktaking.using(execution_id="stocktaking-of-nothing").start(0, 0.0)
