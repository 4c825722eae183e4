"""The task of the dispatcher ``"tasks"``: it runs one execution.

Messages name it by its path, ``loom_django.tasks.run``, which so stays what it is in every release. Celery imports
this module in every project, as it does each app's ``tasks``; so it demands nothing of a project that has its flows
run otherwise.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured

from loom_django import compat, conf
from loom_django.runtime import loom
from loom_django.services.dispatch import TasksDispatcher


def run(execution_id: str) -> str:
    """Run an execution that is ready until it parks or ends; see :meth:`TasksDispatcher.run`."""
    dispatcher = loom.dispatcher
    if not isinstance(dispatcher, TasksDispatcher):  # a message from before the setting was changed
        dispatcher = TasksDispatcher(loom.engine)
    return dispatcher.run(execution_id)


_function = run
del run  # under this name is the task, see __getattr__


def run_task() -> Any:
    """The task, for the backend and the queue in the settings.

    Raises:
        ImproperlyConfigured: there is no Tasks framework, or no such backend in TASKS; the checks say more.
    """
    framework, settings = compat.django_tasks(), conf.get_settings()
    if framework is None:
        raise ImproperlyConfigured(
            'LOOM["DISPATCHER"] is "tasks", and this Django has no Tasks framework: '
            'pip install "loom-django[tasks]", or use Django 6.0'
        )
    return framework.task(backend=settings.TASKS_BACKEND, queue_name=settings.TASKS_QUEUE)(_function)


def __getattr__(name: str) -> Any:
    """``run`` is made when it is asked for: with the module it would bind every project to a backend."""
    if name == "run":
        return run_task()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if conf.get_settings().DISPATCHER == "tasks":
    run_task()  # Celery runs what was made when its worker began
