"""Nobody's transaction outlives the call that opened it.

What is recorded on a connection that was left inside a transaction waits for a commit that never comes, and the
next body of the thread is refused. So it is rolled back, and whoever left it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loom_django.definitions import Tool
from loom_django.errors import ContextMisuseError, EffectInDoubt
from loom_django.stores.base import Store

if TYPE_CHECKING:
    from loom_django.engine.body import Body

log = logging.getLogger("loom_django.run")

_WHY = (
    "left its connection inside a transaction, so its work was rolled back: leave with atomic() what you enter, "
    "and switch autocommit on again"
)


def call_tool(store: Store, tool: Tool[..., Any], call: Callable[[], Any]) -> Any:
    """Call a tool; a plain one is not to leave a transaction open behind it.

    Raises:
        ContextMisuseError: it did. EffectInDoubt: it did, and it may have had an effect besides.
    """
    if tool.is_async or store.in_transaction():
        return call()
    try:
        value = call()
    except BaseException:
        if store.leave_transaction():
            log.warning("tool %s %s", tool.name, _WHY)
        raise
    if store.leave_transaction():
        problem = f"tool {tool.name} {_WHY}"
        raise EffectInDoubt(problem) if tool.idempotent is False else ContextMisuseError(problem)
    return value


def leave_transaction_of(body: Body) -> None:
    """A body has ended: what it left open is rolled back before its end is recorded."""
    if not body.engine.store.leave_transaction():
        return
    log.warning("the body of flow %s %s", body.flow.id, _WHY, extra={"execution_id": body.execution_id})
    if body.misuse is None and body.sealed is None:
        body.misuse = ContextMisuseError(f"the body of flow {body.flow.id} {_WHY}")
