"""Ids are checked where they are handed in, and keys made from different parts never meet.

An idempotency key goes to the outside world, where a collision drops a real charge: it is at most 255
characters long, and no two of (execution, step, generation) share one. That stands on three rules: the
execution's part has no ":", because it is percent-encoded; a step id does not end in ":r" and a number; and
"%~", the mark of a shortened key, cannot be in the execution's part of another.
"""

from __future__ import annotations

import hashlib
import re
from datetime import date, datetime
from uuid import UUID

from loom_django.errors import InvalidIdError, InvalidInputError, shown

MAX_LENGTH = 255
MAX_QUEUE_NAME = 100
_GENERATION = re.compile(r":r[0-9]+\Z").search
_CHAIN = re.compile(r"~[0-9]+\Z").search


# Checks.


def check_id(value: object, what: str) -> str:
    """Return the id as plain text, or refuse it: text of 1 to 255 printable characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_LENGTH or not value.isprintable():
        raise InvalidIdError(value, what)
    # Subclasses, such as members of TextChoices, give their text; str() would ask their own __str__.
    return str.__str__(value)


def check_execution_id(value: object, what: str = "execution id") -> str:
    """Return an id that a user gave to an execution, or refuse it."""
    checked = check_id(value, what)
    if _CHAIN(checked):
        raise InvalidIdError(
            value, what, 'must not end in "~" and a number: continued executions are named so'
        )
    return checked


def check_step_id(value: object, what: str = "step id") -> str:
    """Return the id of a step of any kind, or refuse it."""
    checked = check_id(value, what)
    if _GENERATION(checked):
        raise InvalidIdError(value, what, 'must not end in ":r" and a number: fresh idempotency keys end so')
    return checked


def check_step_name(value: object, what: str = "step id") -> str:
    """Return the id of a declared step, or refuse it."""
    checked = check_step_id(value, what)
    if "#" in checked:
        raise InvalidIdError(value, what, 'must not contain "#": ids of keyed and repeated steps do')
    return checked


def check_text(value: object, what: str, limit: int) -> str:
    """Return the text, or refuse it: of so many characters at most, and such as every database takes."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{what}={shown(value)} must be text")
    if len(value) > limit:
        raise InvalidInputError(f"{what}={shown(value)} has {len(value)} characters, {limit} are allowed")
    if not is_storable(value):
        raise InvalidInputError(
            f"{what}={shown(value)} must have no NUL and no lone surrogates: take them out"
        )
    return str.__str__(value)


def is_storable(text: str) -> bool:
    """Tell if a database takes the text as it is: neither NUL nor a lone surrogate is in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def check_whole(value: object, what: str, low: int, high: int) -> int:
    """Return the whole number, or refuse it: an int from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInputError(f"{what}={shown(value)} must be an int from {low} to {high}")
    return int(value)


def key_suffix(key: str | int | UUID | date) -> str:
    """Return what stands behind the "#" in the id of a keyed step."""
    if isinstance(key, bool | datetime) or not isinstance(key, str | int | UUID | date):
        raise InvalidIdError(key, "step key", "must be text, an int, a UUID or a date")
    if isinstance(key, int):
        # More bits than 255 digits hold; Python itself refuses to write very long numbers.
        return check_step_id(f"{int(key):d}" if key.bit_length() <= 800 else key, "step key")
    return check_step_id(key if isinstance(key, str) else str(key), "step key")


# Keys.


def idempotency_key(execution_id: str, step_id: str, generation: int = 0, content: str = "") -> str:
    """Return the key that the effect of a step is known by outside.

    ``content`` is a digest of what the step is asked, for steps that a model asks for: their ids say only where
    they stand.
    """
    base = f"{execution_id.replace('%', '%25').replace(':', '%3A')}:{check_step_id(step_id)}"
    if content:
        base += f":{content}"
    suffix = f":r{generation}" if generation else ""
    if len(base) + len(suffix) <= MAX_LENGTH:
        return base + suffix
    return _shortened(base, "%~", len(suffix)).replace(":", "~") + suffix


def child_id(parent: str, flow: str, n: int | str) -> str:
    """Return the id of the n-th child of that flow; in a branch, ``n`` is its path and the number."""
    # Without the escape, "a/b" starting "c" and "a" starting "b/c" would name the same child.
    full = f"{parent}/{flow.replace('%', '%25').replace('/', '%2F')}#{n}"
    return full if len(full) <= MAX_LENGTH else _shortened(full, ".")


def repeated_id(base: str, path: str, number: int) -> str:
    """Return the id of the number-th plain call of a step in a scope; "" is the flow's body itself."""
    if not path:
        return base if number == 1 else f"{base}#{number}"
    full = f"{base}#{path}" if number == 1 else f"{base}#{path}.{number}"
    return full if len(full) <= MAX_LENGTH else _shortened(full, ".")


def turn_id(loop: str, path: str, turn: int, call: int = 0) -> str:
    """Return the id of a model's turn in an agent loop, or of a call of that turn; both are numbered from 1."""
    place = f"{path}:turn:{turn}" if path else f"turn:{turn}"
    full = f"{loop}#{place}:tool:{call}" if call else f"{loop}#{place}"
    return full if len(full) <= MAX_LENGTH else _shortened(full, ".")


def budget_key(loop: str, path: str, resource: str) -> str:
    """Return what an answer for more of a resource names; in a branch the loop too, since others may wait beside it."""
    full = f"{loop}:{resource}" if path else resource
    return full if len(full) <= MAX_LENGTH else _shortened(full, ".")


def branch_path(scope: str, name: str) -> str:
    """Return the path of a branch; its name is escaped, so that no two paths are the same."""
    return f"{scope}.{escaped(name)}"


def escaped(name: str) -> str:
    """Return a name without the characters that part names from each other."""
    for character in "%.#:[]":
        name = name.replace(character, f"%{ord(character):02X}")
    return name


def successor_id(chain: str, link: int) -> str:
    """Return the id of the link-th member of a chain; the first one has the chain's own.

    No other execution has such an id: what a user gives must not end so, and what is made otherwise does not.
    """
    suffix = f"~{link}" if link > 1 else ""
    if len(chain) + len(suffix) <= MAX_LENGTH:
        return chain + suffix
    return _shortened(chain, ".", len(suffix)) + suffix


def occurrence_id(schedule_id: str, epoch_ms: int) -> str:
    """Return the id of the execution that a schedule starts for that instant."""
    full = f"{schedule_id}@{epoch_ms}"
    return full if len(full) <= MAX_LENGTH else _shortened(full, ".")


def _shortened(text: str, mark: str, reserve: int = 0) -> str:
    """Keep a readable head of the text, and stand in for all of it by its SHA-256."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text[: MAX_LENGTH - len(mark) - len(digest) - reserve] + mark + digest
