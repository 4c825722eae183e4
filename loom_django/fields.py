"""Column types that neither database has under one name."""

from __future__ import annotations

from typing import Any

from django.db import models


class EncodedField(models.TextField):  # type: ignore[type-arg]  # generic only in the stubs
    """JSON text whose bytes and order must survive: ``json`` on PostgreSQL (``jsonb`` reorders), else text.

    Always read and written as text; parsing is the codec's affair.
    """

    description = "JSON text, order kept"

    def db_type(self, connection: Any) -> str:
        return "json" if connection.vendor == "postgresql" else "text"

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        if compiler.connection.vendor == "postgresql":
            return f"{sql}::text", params
        return sql, params


class IdField(models.CharField):  # type: ignore[type-arg]  # generic only in the stubs
    """An execution's id: compared byte by byte on PostgreSQL too, whatever the database's collation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("max_length", 255)
        super().__init__(*args, **kwargs)

    def db_type(self, connection: Any) -> str | None:
        kind = super().db_type(connection)
        if connection.vendor == "postgresql" and kind is not None:
            # By its long name: for "varchar" Django adds an index for LIKE, which byte order needs not.
            return kind.replace("varchar", "character varying")
        return kind

    def db_parameters(self, connection: Any) -> dict[str, Any]:
        parameters = super().db_parameters(connection)
        if connection.vendor == "postgresql":
            parameters["collation"] = "C"
        return parameters
