"""The shop's own tables. Nothing in them knows that flows exist."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q


class Product(models.Model):
    name = models.CharField(max_length=100, unique=True)
    price = models.DecimalField(max_digits=9, decimal_places=2)
    stock = models.IntegerField()

    class Meta:
        # The database itself refuses to sell what is not there.
        constraints = [models.CheckConstraint(name="shop_stock_left", condition=Q(stock__gte=0))]

    def __str__(self) -> str:
        return self.name

    def take_one(self) -> None:
        """Take one piece out of stock.

        Raises:
            IntegrityError: none is left.
        """
        Product.objects.filter(pk=self.pk).update(stock=F("stock") - 1)


class Order(models.Model):
    class State(models.TextChoices):
        PLACED = "placed", "placed"
        PAID = "paid", "paid"
        REFUSED = "refused", "refused and refunded"
        CLOSED = "closed", "paid, and the time to return it is over"

    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    customer = models.CharField(max_length=100)
    iban = models.CharField("seller's account", max_length=40)
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    state = models.CharField(max_length=10, choices=State.choices, default=State.PLACED)
    transfer_id = models.CharField(max_length=40, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"order {self.pk}"

    @property
    def execution_id(self) -> str:
        """One order, one execution: placing it twice under this id would start nothing new."""
        return f"order-{self.pk}"

    @property
    def is_paid(self) -> bool:
        return self.state in (self.State.PAID, self.State.CLOSED)


class Booking(models.Model):
    """A line of the shop's books. Written twice, the year's accounts are wrong."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT, related_name="bookings")
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    text = models.CharField(max_length=200)

    def __str__(self) -> str:
        return self.text
