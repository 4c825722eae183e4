"""A task backend that keeps its messages in a list, and one that is away."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from loom_django import compat

Base: Any = import_module(f"{compat.django_tasks().__name__}.backends.base").BaseTaskBackend

SENT: list[str] = []


class RecordingBackend(Base):  # type: ignore[misc]  # of one of two packages
    """What was enqueued stands in ``SENT``, by execution id."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        self.validate_task(task)
        assert not args
        assert task.module_path == "loom_django.tasks.run"
        SENT.append(kwargs["execution_id"])


class AwayBackend(Base):  # type: ignore[misc]
    """A broker that cannot be reached."""

    tried = 0

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        AwayBackend.tried += 1
        raise ConnectionRefusedError("the broker is away")
