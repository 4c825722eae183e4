"""The budget of an agent loop: what it has used, what it may use, and the answer that lets it use more.

What a loop has used is in the fold: every amount that its steps have metered, of failed attempts too. A limit is
given in the code and raised by answers; the highest one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from loom_django.errors import InvalidInputError, shown
from loom_django.kernel import codec, keys
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import ON_BUDGET, Wait

REASON: Final = "budget-exhausted"


def checked(budget: object) -> dict[str, Decimal]:
    """The limits by resource.

    Raises:
        InvalidInputError: no mapping, or a limit that is no finite int or Decimal above 0. InvalidIdError.
    """
    if budget is None:
        return {}
    if not isinstance(budget, Mapping):
        raise InvalidInputError(f"budget={shown(budget)} must be a dict of limits by resource")
    for resource, limit in budget.items():
        keys.check_id(resource, "metered resource")
        number = isinstance(limit, int | Decimal) and not isinstance(limit, bool)
        if not number or not Decimal(limit).is_finite() or limit <= 0:
            raise InvalidInputError(
                f"budget[{resource!r}]={shown(limit)} must be an int or a Decimal above 0: write Decimal('0.50')"
            )
    return {resource: Decimal(limit) for resource, limit in budget.items()}


def used(fold: Fold, loop: str, resource: str) -> Decimal:
    """What the loop has metered of a resource."""
    return fold.spent.get((loop, resource), Decimal(0))


def raised(fold: Fold, loop: str, resource: str) -> list[Wait]:
    """The answered waits of a loop for more of a resource, in order."""
    answered: list[Wait] = []
    while (wait := fold.waits.get(_wait_id(loop, resource, len(answered) + 1))) and wait.answered:
        answered.append(wait)
    return answered


def exhausted(fold: Fold, loop: str, path: str, limits: Mapping[str, Decimal]) -> Wait | None:
    """The wait of the first resource whose limit is reached; None while the loop, in that scope, may go on."""
    for resource, given in limits.items():
        answers = raised(fold, loop, resource)
        limit = max([given, *(_limit(codec.decode(wait.answer)) for wait in answers)])
        spent = used(fold, loop, resource)
        if spent >= limit:
            about = {"loop": loop, "resource": resource, "used": str(spent), "limit": str(limit)}
            wait_id = _wait_id(loop, resource, len(answers) + 1)
            return Wait(wait_id, ON_BUDGET, keys.budget_key(loop, path, resource), budget=about)
    return None


def check_answer(fold: Fold, wait: Wait, payload: str | None) -> None:
    """Refuse an answer, as the log is to keep it, that would not let the loop go on.

    Raises:
        InvalidInputError: no limit, or one that is used up already.
    """
    if wait.on != ON_BUDGET:
        return
    limit = _limit(codec.loads(payload) if payload is not None else None)
    resource = wait.budget["resource"]
    spent = used(fold, wait.budget["loop"], resource)
    if limit <= spent:
        raise InvalidInputError(
            f"the limit of {resource} must be above the {spent} that are used, not {limit}"
        )


def _limit(payload: Any) -> Decimal:
    limit = payload.get("limit") if isinstance(payload, dict) else None
    if isinstance(limit, int | float | Decimal) and not isinstance(limit, bool):
        exact = Decimal(str(limit) if isinstance(limit, float) else limit)
        if exact.is_finite():
            return exact
    raise InvalidInputError(
        f'the payload of {ON_BUDGET} is {{"limit": a number above what is used}}, not {shown(payload)}'
    )


def _wait_id(loop: str, resource: str, number: int) -> str:
    return f"budget:{keys.escaped(loop)}:{keys.escaped(resource)}#{number}"
