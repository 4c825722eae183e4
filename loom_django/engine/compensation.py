"""Steps that undo what a flow has done, when it fails: in reverse order, each an ordinary step.

A body is run again from its top, so what it registers needs no record: a failed body fails again on a replay,
and goes on with the compensations that the log does not hold. They retry, park and are put in doubt as any step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from loom_django.engine.body import Body, Compensation
from loom_django.engine.drive import Enter, Steps
from loom_django.errors import StepFailed

log = logging.getLogger("loom_django.run")


def compensated(body: Body, call: Callable[[], Any]) -> Callable[[], Any]:
    """A body's call that runs its compensations if it fails; what it raises is raised after them.

    Not for a flow with ``on_error="park"``: it is to go on after a fix. Not after misuse, which lets nothing more
    be dispatched.
    """
    if body.flow.is_async:
        return partial(_awaited, body, call)
    return partial(_called, body, call)


def _called(body: Body, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:
        driver: Any = body.driver
        for compensation in _due(body):
            driver.drive(_compensate(body, compensation))
        raise


async def _awaited(body: Body, call: Callable[[], Any]) -> Any:
    try:
        return await call()
    except Exception:
        driver: Any = body.driver
        for compensation in _due(body):
            await driver.drive(_compensate(body, compensation))
        raise


def _due(body: Body) -> list[Compensation]:
    stopped = body.sealed is not None or body.misuse is not None
    if stopped or body.flow.on_error == "park":
        return []
    body.shared.undoing = True
    return body.shared.compensations[::-1]


def _compensate(body: Body, it: Compensation) -> Steps[None]:
    yield Enter(partial(body.enter, "on_failure"))
    try:
        yield from body.perform(it.step_id, it.tool, it.args, it.kwargs)
    except StepFailed as exc:
        # The others are to run all the same; the failure is in the log.
        about = {"execution_id": body.execution_id, "step_id": it.step_id}
        log.error("a compensation failed: %s", exc, extra=about)
