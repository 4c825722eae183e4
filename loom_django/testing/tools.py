"""One tool alone, in a unit test: with a context, and with arguments and a result as a flow would have them."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any, Final, ParamSpec, TypeVar

from loom_django.conf import get_settings
from loom_django.definitions import Tool
from loom_django.engine.context import StepContext
from loom_django.errors import ContextMisuseError, InvalidInputError
from loom_django.kernel import codec
from loom_django.kernel.keys import idempotency_key
from loom_django.runtime import loom

P = ParamSpec("P")
R = TypeVar("R")

EXECUTION_ID: Final = "run-tool"
FLOW_ID: Final = "run-tool"


def run_tool(tool: Tool[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a tool once, as its step's first attempt, and return its result.

    Arguments and result go through the codec, so what could not be recorded is refused here too. A
    transactional tool runs in a transaction. An async tool gets an event loop of its own. Retries and
    timeouts are a flow's business.

    Raises:
        UnencodableValueError, PayloadTooLargeError: an argument or the result cannot be recorded.
        ContextMisuseError: an async tool inside a running event loop: ``await arun_tool(...)``.
        Exception: whatever the tool raises.
    """
    if tool.is_async:
        if _in_event_loop():
            raise ContextMisuseError("run_tool() would block the event loop: await arun_tool()")
        return asyncio.run(arun_tool(tool, *args, **kwargs))
    given = _as_recorded(tool, args, kwargs)
    with loom.store.transaction() if tool.transactional else nullcontext():
        result: R = _after_codec(tool, tool.func(_context(tool), *given["args"], **given["kwargs"]))
        return result


async def arun_tool(tool: Tool[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """:func:`run_tool` for an async tool, awaited.

    Raises:
        ContextMisuseError: the tool is a plain function: ``run_tool(...)``.
    """
    if not tool.is_async:
        raise ContextMisuseError(f"{tool.name} is no async tool: run_tool({tool.name}, ...)")
    given = _as_recorded(tool, args, kwargs)
    result: R = _after_codec(tool, await tool.func(_context(tool), *given["args"], **given["kwargs"]))
    return result


def _context(tool: Tool[..., Any]) -> StepContext:
    step_id = tool.step_id or tool.name
    return StepContext(
        execution_id=EXECUTION_ID,
        flow_id=FLOW_ID,
        step_id=step_id,
        idempotency_key=idempotency_key(EXECUTION_ID, step_id, 0),
        attempt=1,
    )


def _as_recorded(tool: Tool[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        tool.check_call(args, kwargs)
    except TypeError as exc:
        raise InvalidInputError(f"{exc}: {tool.name}{tool.signature}") from None
    return {
        "args": _copied(list(args), f"{tool.name}: args"),
        "kwargs": _copied(dict(kwargs), f"{tool.name}: kwargs"),
    }


def _after_codec(tool: Tool[..., Any], value: Any) -> Any:
    return _copied(value, f"result of {tool.name}")


def _copied(value: Any, path: str) -> Any:
    return codec.loads(codec.dumps(value, path=path, limit=get_settings().MAX_PAYLOAD_BYTES))


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
