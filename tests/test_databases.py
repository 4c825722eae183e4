"""The suite's own footing: the database that was asked for, and processes that meet in it."""

from __future__ import annotations

import os
import subprocess
import sys
from decimal import Decimal

import pytest
from django.db import connection

from tests import postgres
from tests.shop.models import Order

WRITE = """
import django
django.setup()
from tests.shop.models import Order
Order.objects.create(customer="child", amount="9.90")
"""


@pytest.mark.django_db
def test_the_database_is_the_one_asked_for():
    """The second pass does not quietly run on SQLite again."""
    assert connection.vendor == os.environ.get("LOOM_TEST_DATABASE", "sqlite")


@pytest.mark.django_db
def test_the_database_serves_many_at_once():
    """SQLite writes ahead; PostgreSQL acknowledges what is durable, and a proxy can stand before it (TCP)."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("PRAGMA journal_mode")
            assert cursor.fetchone() == ("wal",)
        else:
            cursor.execute("SELECT current_setting('synchronous_commit'), inet_server_port() IS NOT NULL")
            assert cursor.fetchone() == ("on", True)


@pytest.mark.django_db(transaction=True)
def test_a_child_process_meets_the_test_in_its_database(child_env):
    """What a started process commits, the test reads."""
    subprocess.run([sys.executable, "-c", WRITE], env=child_env(), check=True, timeout=60)

    assert Order.objects.get(customer="child").amount == Decimal("9.90")


@pytest.mark.once
def test_a_server_can_be_named_at_another_address():
    """A proxy between a process and the server needs nothing but another host and port in the URL."""
    url = "postgresql://me:a%2Fb@127.0.0.1:5432/postgres?sslmode=disable"

    assert postgres.url_with(url, port=7, database="test_loom_gw0") == (
        "postgresql://me:a%2Fb@127.0.0.1:7/test_loom_gw0?sslmode=disable"
    )
