"""What the tests' flows work on. No migrations: the tables are made with the test database."""

import uuid

from django.db import models


class Order(models.Model):
    customer = models.TextField()
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    paid = models.BooleanField(default=False)
    note = models.TextField(blank=True)

    def __str__(self) -> str:
        return f"{self.customer}: {self.amount}"


class Ledger(models.Model):
    """What a provider saw: one row for each time that an effect really ran."""

    key = models.TextField()
    step = models.TextField()
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "ledger"

    def __str__(self) -> str:
        return f"{self.step} with {self.key}"


class Parcel(models.Model):
    """An object whose key is a UUID."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)

    def __str__(self) -> str:
        return str(self.pk)


class Country(models.Model):
    """An object whose key is text."""

    code = models.CharField(primary_key=True, max_length=20)

    def __str__(self) -> str:
        return self.code
