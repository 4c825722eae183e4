"""Some keys of ``LOOM`` changed for a test, the others as they are."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.test import override_settings

from loom_django.conf import KEYS, problem_of, suggestion
from loom_django.errors import InvalidInputError


class override_loom(override_settings):
    """Change keys of ``LOOM`` for a test: ``override_loom(DISPATCHER="worker")``.

    A decorator of functions and of Django's test classes, and a context manager.

    Raises:
        InvalidInputError: an unknown key, or a value that cannot be used.
    """

    def __init__(self, **keys: Any) -> None:
        for key, value in keys.items():
            if key not in KEYS:
                meant = suggestion(key)
                raise InvalidInputError(
                    f"LOOM has no key {key!r}" + (f"; did you mean {meant!r}?" if meant else "")
                )
            if problem := problem_of(key, value):
                raise InvalidInputError(f"LOOM[{key!r}] {problem}")
        self.keys = keys
        super().__init__(LOOM=keys)

    def enable(self) -> None:
        self.options = {"LOOM": {**getattr(settings, "LOOM", {}), **self.keys}}
        super().enable()

    def save_options(self, test_func: Any) -> None:
        # A test class keeps what its decorators change and enables it later, all at once.
        kept = (test_func._overridden_settings or {}).get("LOOM", getattr(settings, "LOOM", {}))
        self.options = {"LOOM": {**kept, **self.keys}}
        super().save_options(test_func)
