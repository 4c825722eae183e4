"""The result of a call that nobody waits for any more: noted for the operator, never applied."""

from __future__ import annotations

import logging
from typing import Final

from loom_django.engine.core import Engine
from loom_django.engine.drive import Outcome
from loom_django.engine.outside import note
from loom_django.errors import LoomError
from loom_django.kernel import codec
from loom_django.kernel.events import Encoded, Kind
from loom_django.kernel.failures import describe_error

log = logging.getLogger("loom_django.late")

# What an operator is told of how an abandoned call failed, in bytes at most.
MAX_ERROR_BYTES: Final = 2000


def note_late_result(engine: Engine, execution_id: str, step_id: str, outcome: Outcome, attempt: int) -> None:
    """Append EFFECT_RETURNED_LATE; a failure to do so is logged, since no caller is left to hear it."""
    fields: dict[str, object] = {
        "step": step_id,
        "attempt": attempt,
        "elapsed_ms": round(outcome.elapsed * 1000),
    }
    try:
        fields |= _ending(engine, outcome)
        note(engine, execution_id, Kind.EFFECT_RETURNED_LATE, fields)
    except Exception:
        log.exception(
            "a late result could not be noted", extra={"execution_id": execution_id, "step_id": step_id}
        )


def _ending(engine: Engine, outcome: Outcome) -> dict[str, object]:
    limit = engine.settings().MAX_PAYLOAD_BYTES
    error = outcome.error
    if error is None:
        try:
            return {"output": Encoded.of(outcome.value, path="late result", limit=limit)}
        except LoomError as exc:
            error = exc
    described = describe_error(error, MAX_ERROR_BYTES)
    return {"error": {"type": described["type"], "message": codec.encode(described["message"])}}
