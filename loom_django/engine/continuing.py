"""Continuing as new: a log ends, and its chain goes on in a fresh one.

The end of the one and the start of the other are one commit, so a crash leaves both or neither. Messages, their
wakes, and whatever else is addressed to an execution from outside belong to the chain, so nothing of it is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from loom_django.definitions import Flow
from loom_django.engine.children import flow_named
from loom_django.engine.drive import Enter, Io, Steps
from loom_django.engine.start import successor_start
from loom_django.engine.unwind import Unwind, Why
from loom_django.errors import ContextMisuseError, InvalidInputError, LoomError
from loom_django.kernel import keys
from loom_django.kernel.events import Kind
from loom_django.stores.base import NOBODY

if TYPE_CHECKING:
    from loom_django.engine.body import Body

_CALL: Final = "ctx.continue_as_new"


def continue_as_new(
    body: Body, flow: Flow[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Steps[NoReturn]:
    """End this log and go on in a new one with these arguments; leaves the body."""
    yield Enter(partial(body.enter, "continue_as_new"))
    if body.path:
        body.refuse(
            ContextMisuseError(f"{_CALL} in a branch would leave its siblings: call it after ctx.parallel")
        )
    if body.shared.deciding:
        body.refuse(
            ContextMisuseError(f"{_CALL} in a decider would end its decision: call it after ctx.decide")
        )
    wanted = body.checked(lambda: flow_named(body, flow))
    if wanted.options.given:
        body.refuse(
            InvalidInputError(
                f"{_CALL} takes no options ({', '.join(wanted.options.given)}): subject, attributes, queue, "
                f"priority and deadline go along by themselves. Leave using() out",
                wanted.id,
            )
        )
    given = body.checked(lambda: wanted.bind_input(args, kwargs))
    yield from body.begin_continuing()
    yield Io(lambda: _land(body, wanted, given))
    raise AssertionError("a body does not come back from its end")


def _land(body: Body, flow: Flow[..., Any], given: Mapping[str, Any]) -> NoReturn:
    engine, fold = body.engine, body.journal.fold
    children = _to_be_closed(body)
    link = body.ask_store(lambda: _next_link(body))
    successor = keys.successor_id(fold.chain, link)
    try:
        start = successor_start(engine, flow, given, fold, successor, link, children)
    except LoomError as exc:
        body.refuse(exc)
    body.journal.record(Kind.EXECUTION_CONTINUED, {"successor": successor})
    body.land(ownership=NOBODY, timers_off=None, also=(start,))
    engine.store.on_commit(partial(engine.started, successor))
    body.sealed, body.misuse = Unwind(Why.CONTINUED), None
    raise body.sealed


def _to_be_closed(body: Body) -> list[str]:
    """The children that are to end with their parent, and have not ended."""
    ids = [child for child, policy in body.journal.fold.children.items() if policy == "cancel"]
    ends = body.ends_of(ids)
    return [child for child in ids if child in ends and ends[child] is None]


def _next_link(body: Body) -> int:
    """The place of the successor in its chain; ids that a chain of this id has left behind are passed over."""
    fold = body.journal.fold
    link = int(fold.options.get("link", 1)) + 1
    while body.engine.store.status(keys.successor_id(fold.chain, link)) is not None:
        link += 1
    return link
