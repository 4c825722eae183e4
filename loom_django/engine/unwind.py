"""How a body is left without being finished.

One private BaseException, so that ``except Exception`` in a flow catches outcomes only. Whatever stops a body
(a park, a lost fence, a cancel, the store gone) is a reason of it, never an exception of its own.
"""

from __future__ import annotations

import enum

from loom_django.errors import LoomError


class Why(enum.Enum):
    """Why a body was left."""

    PARKED = "parked"  # its park has landed
    CONTINUED = "continued"  # its successor's start has landed
    LOST = "lost"  # another owner has it, or it has ended
    MISUSED = "misused"  # an earlier call was misuse, and the body went on
    STORE = "store"  # the log could not be written; the lease's end hands it to somebody else
    REFUSED = "refused"  # this code cannot read what the log holds; nothing is wrong with the execution
    DIVERGED = "diverged"  # it does not ask for what the log holds; it is to park on a gate
    INTERRUPTED = "interrupted"  # this process is told to end
    OVER = "over"  # it had ended before its context was called; of whoever called, not of that body
    WAITING = "waiting"  # a parallel branch waits; its scope parks when no other branch runs
    SIBLING = "sibling"  # another branch of the scope has failed
    CRASHED = "crashed"  # the testing kit stops the run as a kill would: nothing more is written


class Unwind(BaseException):
    """Leaves a body. Never caught by a flow: one that swallows it meets it again at its next call."""

    def __init__(self, why: Why, cause: BaseException | None = None) -> None:
        super().__init__(why.value)
        self.why = why
        self.cause = cause


def late_call(raised: BaseException | None) -> LoomError | None:
    """What is wrong with a body, or a branch, that called the context of another that had ended, and was left by that."""
    late = raised.cause if isinstance(raised, Unwind) and raised.why is Why.OVER else None
    return late if isinstance(late, LoomError) else None
