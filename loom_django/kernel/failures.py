"""An exception of any kind is described as plain data of bounded size; describing it never fails.

Exceptions themselves are not stored: their classes may be local, take arguments of their own, or be gone by
the time that they are read.
"""

from __future__ import annotations

import traceback
from typing import Any

from loom_django.errors import class_name


def describe_error(exc: BaseException, limit_bytes: int) -> dict[str, Any]:
    """Return type, bases, message and traceback; message and traceback take at most `limit_bytes` each."""
    name, *bases = (class_name(cls) for cls in type(exc).__mro__ if cls is not object)
    return {
        "type": name,
        "bases": bases,
        "message": bounded(_message(exc), limit_bytes),
        "traceback": bounded(_traceback(exc), limit_bytes),
    }


def bounded(text: str, limit_bytes: int) -> str:
    """Return the text, or its two ends with a note between them, in at most `limit_bytes` of UTF-8."""
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) <= limit_bytes:
        return str.__str__(text)  # a str subclass, which an exception may give, cannot be recorded
    note = f"\n[… {len(raw)} bytes in all …]\n"
    half = (limit_bytes - len(note.encode())) // 2
    if half <= 0:
        return _readable(raw[:limit_bytes])
    return _readable(raw[:half]) + note + _readable(raw[-half:])


def _readable(raw: bytes) -> str:
    # A cut may split a character; what is left of it goes.
    return raw.decode("utf-8", "ignore")


def _message(exc: BaseException) -> str:
    try:
        return str(exc)
    except BaseException as broken:  # whatever a broken __str__ raises, the failure itself must be told
        return f"[no message: its __str__ raised {class_name(type(broken))}]"


def _traceback(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(exc))
    except BaseException as broken:  # likewise: __notes__ and __cause__ are the user's too
        return f"[no traceback: writing it raised {class_name(type(broken))}]"
