"""Where logs, timers, messages and leases live: one store per database alias, chosen by its vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loom_django.stores.base import Store


def store_for(alias: str) -> Store:
    """The store over the database of this alias.

    Raises:
        ImproperlyConfigured: the database is neither PostgreSQL (with psycopg 3) nor SQLite.
    """
    from django.core.exceptions import ImproperlyConfigured
    from django.db import connections

    match connections[alias].vendor:
        case "postgresql":
            try:
                from loom_django.stores.postgresql import PostgresStore
            except ImportError as error:
                raise ImproperlyConfigured(
                    "loom_django needs psycopg 3 for PostgreSQL: pip install loom-django[postgres]"
                ) from error
            return PostgresStore(alias)
        case "sqlite":
            from loom_django.stores.sqlite import SqliteStore

            return SqliteStore(alias)
        case vendor:
            raise ImproperlyConfigured(
                f'loom_django keeps its log in PostgreSQL or SQLite; the database "{alias}" is {vendor}. '
                'Name an alias of one of them in LOOM["DATABASE"].'
            )
