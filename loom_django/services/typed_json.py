"""JSON that a person types becomes the value that a program expects, or a sentence that says what is wrong.

Integers of any size stay exact, and so do decimals where a Decimal is expected. What an annotation does not say
is left as JSON has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn

from loom_django.errors import InvalidInputError
from loom_django.kernel import json_types


def read(text: str) -> Any:
    """The value of a JSON text: integers of any size exact, no key twice, nothing that JSON does not know.

    Raises:
        InvalidInputError: with what is wrong and where.
    """
    return _parse_json(text, float)


def read_as(kind: Any, text: str, path: str) -> Any:
    """The value of a JSON text as an annotation says it is; ``path`` names it in messages.

    Raises:
        InvalidInputError: with what is wrong and where.
    """
    return json_types.convert(kind, _parse_json(text, Decimal), path)


def _parse_json(text: str, parse_float: Callable[[str], Any]) -> Any:
    if not text.strip():
        raise InvalidInputError("give the value as JSON; null if there is none")
    try:
        return json.loads(
            text, parse_float=parse_float, parse_constant=_no_constant, object_pairs_hook=_no_key_twice
        )
    except json.JSONDecodeError as exc:
        hint = "" if text.lstrip()[:1] in '{["' else ' Text goes in double quotes: "tx-7".'
        raise InvalidInputError(
            f"this is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}.{hint}"
        ) from exc
    except RecursionError as exc:
        raise InvalidInputError("this JSON is nested too deeply") from exc
    except InvalidInputError:
        raise
    except ValueError as exc:  # more digits than Python reads
        raise InvalidInputError(f"this JSON cannot be read: {exc}") from exc


def _no_constant(name: str) -> NoReturn:
    raise InvalidInputError(f"{name} is not JSON; give a number, or null")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidInputError(f"the key {twice!r} stands twice in one object")
    return found
