"""Children: executions that a flow starts and may wait for.

A child's start lands with its parent's CHILD_STARTED, or not at all. Its end wakes the parent in its own last
commit. How it ended is a fact of the parent's log from the moment that the parent's body has seen it, so a
replay asks nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

from loom_django.definitions import AwaitMode, Child, Flow, Outcome
from loom_django.engine.core import Engine
from loom_django.engine.drive import Enter, Io, Land, Steps
from loom_django.engine.start import child_start
from loom_django.errors import (
    ChildFailed,
    ContextMisuseError,
    ExecutionConflictError,
    InvalidInputError,
    shown,
)
from loom_django.kernel import codec, keys
from loom_django.kernel.durations import Duration
from loom_django.kernel.events import Encoded, Event, Kind
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import CHILD_DECISION, ON_CHILD, Wait, WaitStatus

if TYPE_CHECKING:
    from loom_django.engine.body import Body

MODES: Final = get_args(AwaitMode)

CHILD_EVENT: Final = "ChildDone"

# Which child an "any" was answered by; under this name and the wait's.
_FIRST: Final = "__loom_first__:"

MISSING: Final = "MISSING"


def start_child(
    body: Body, flow: Flow[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Steps[Child[Any]]:
    """Start a child under an id made of names and counts, or take the one that the log holds."""
    yield Enter(partial(body.enter, "start_child"))
    wanted = body.checked(lambda: flow_named(body, flow))
    given = body.checked(lambda: wanted.bind_input(args, kwargs))
    options = wanted.options
    number = body.count(f"child:{wanted.id}")
    place = f"{body.path}.{number}" if body.path else number
    note = f"child:{options.execution_id or f'{wanted.id}#{place}'}"
    known = body.journal.fold.child_ids.get(note)
    if known is not None:
        body.shared.unserved -= 1
        return Child(known, wanted.id)
    child_id = options.execution_id or keys.child_id(body.execution_id, wanted.id, place)
    body.begin_child(child_id)
    yield Io(lambda: _land_start(body, wanted, given, child_id, note))
    return Child(child_id, wanted.id)


def flow_named(body: Body, flow: Flow[..., Any] | str) -> Flow[..., Any]:
    """A flow, or the one of that id that new executions get."""
    if isinstance(flow, Flow):
        return flow
    return body.engine.registry.current(keys.check_id(flow, "flow id"))


def _land_start(body: Body, flow: Flow[..., Any], given: Mapping[str, Any], child_id: str, note: str) -> None:
    engine, policy = body.engine, flow.options.on_parent_close
    parent = body.journal.fold.chain
    if child_id in body.journal.fold.children:  # under another name: the append could not tell whose it is
        body.refuse(ExecutionConflictError(child_id, "parent"))
    start = body.checked(lambda: child_start(engine, flow, given, flow.options, child_id, parent))
    fields = {"note": note, "child": child_id, "flow": flow.id, "on_parent_close": policy}
    event = body.journal.record(Kind.CHILD_STARTED, fields)
    body.did(event.data["at"])
    body.land_start(start)


def await_child(body: Body, child: Child[Any]) -> Steps[Any]:
    """The child's result."""
    yield Enter(partial(body.enter, "await_child"))
    _check_children(body, [child])
    outcomes = yield from _await(body, [child], "all", None)
    if outcomes[0].error is not None:
        raise outcomes[0].error
    return outcomes[0].value


def await_children(
    body: Body, children: Sequence[Child[Any]], mode: str, timeout: Duration | None
) -> Steps[Any]:
    """``all``: the results. ``settled``: how each ended. ``any``: how the first ended that was seen to."""
    yield Enter(partial(body.enter, "await_children"))
    if mode not in MODES:
        body.refuse(InvalidInputError(f"mode={shown(mode)} must be one of {', '.join(map(repr, MODES))}"))
    wanted = _check_children(body, children)
    if not wanted:
        if mode == "any":
            body.refuse(InvalidInputError('await_children(mode="any") of no children would wait for ever'))
        return []
    outcomes = yield from _await(body, wanted, mode, timeout)
    if mode == "any":
        return outcomes[0]
    if mode == "settled":
        return outcomes
    failed = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    if failed is not None:
        raise failed
    return [outcome.value for outcome in outcomes]


def _check_children(body: Body, children: object) -> list[Child[Any]]:
    if isinstance(children, str) or not isinstance(children, Sequence):
        body.refuse(InvalidInputError("await_children takes a list of what ctx.start_child returned"))
    known = set(body.journal.fold.child_ids.values())
    for child in children:
        if not isinstance(child, Child):
            body.refuse(InvalidInputError(f"{child!r} is no child: pass what ctx.start_child returned"))
        if child.id not in known:
            body.refuse(ContextMisuseError(f"{child.id!r} is no child of this execution: start it first"))
    return list(children)


def _await(
    body: Body, children: list[Child[Any]], mode: str, timeout: Duration | None
) -> Steps[list[Outcome]]:
    wait_id = body.mint("children")
    wait = body.journal.fold.waits.get(wait_id)
    if wait is not None and wait.status is WaitStatus.TIMED_OUT:
        body.take(wait)
    known = _known(body, children, mode, wait_id)
    if known is not None:
        return known
    (body.begin_new if wait is None else body.begin_live)()
    # An answered wait says that enough have ended; what came of them is looked up, and recorded, here.
    answered = wait is not None and wait.answered
    wake_at = wait.wake_at if wait else body.timeout_at(timeout)
    ids = tuple(child.id for child in children)
    parked = Wait(
        wait_id,
        ON_CHILD,
        ids[0] if len(ids) == 1 else None,
        wake_at,
        children=ids,
        mode="any" if mode == "any" else "all",
    )
    while True:
        wakes = yield Io(body.wakes)
        ends = yield Io(lambda: body.ends_of(ids))
        if enough(ends, parked):
            break
        if answered:
            raise AssertionError("children whose wait was answered have not ended")
        yield from body.before_park([parked])
        # A child that ended since the look refuses the park: the body looks again.
        yield Land(partial(body.park, "waiting", [parked], wakes=wakes))
    _record(body, ends, children, mode, wait_id)
    if body.deferred:
        yield Land(body.landing)
    outcomes = _known(body, children, mode, wait_id)
    if outcomes is None:
        raise AssertionError("what was recorded is known")
    return outcomes


def _record(
    body: Body, ends: Mapping[str, Event | None], children: list[Child[Any]], mode: str, wait_id: str
) -> None:
    """Make facts of this log of how the children ended; of the first one only, in the order given, for "any"."""
    decisions = body.journal.fold.decisions
    wanted = [child.id for child in children]
    if mode == "any":
        first = next(child for child in wanted if child not in ends or ends[child] is not None)
        fields = {"decision": _FIRST + wait_id, "value": Encoded.of(first)}
        body.journal.record(Kind.DECISION_RECORDED, fields)
        wanted = [first]
    for child_id in wanted:
        name = CHILD_DECISION + child_id
        if name not in decisions:
            value = Encoded(_told(ends.get(child_id)))
            event = body.journal.record(Kind.DECISION_RECORDED, {"decision": name, "value": value})
            body.did(event.data["at"])


def _known(body: Body, children: list[Child[Any]], mode: str, wait_id: str) -> list[Outcome] | None:
    """How the children ended as the log has it; None if it does not have all that is asked for."""
    decisions = body.journal.fold.decisions
    wanted = [child.id for child in children]
    if mode == "any":
        first = decisions.get(_FIRST + wait_id)
        if first is None:
            return None
        body.served(first.at)
        wanted = [body.decode(first.value)]
    found = [decisions.get(CHILD_DECISION + child_id) for child_id in wanted]
    if any(decision is None for decision in found):
        return None
    outcomes = []
    for child_id, decision in zip(wanted, found, strict=True):
        if decision is not None:
            body.served(decision.at)
            outcomes.append(_outcome(body, child_id, decision.value))
    return outcomes


def _told(event: Event | None) -> str:
    """An end as the parent's log keeps it; None is a child of which nothing is left."""
    if event is None:
        return _packed({"status": MISSING})
    data, status = event.data, event.kind.removeprefix("EXECUTION_")
    if status == "COMPLETED":
        return _packed({"status": status, "result": data.get("result")})
    if status == "FAILED":
        error = data["error"]
        return _packed({"status": status, "type": error.get("type", ""), "message": error.get("message", "")})
    return _packed({"status": status, "message": codec.encode(data.get("reason", ""))})


def _packed(fields: Mapping[str, Any]) -> str:
    """JSON of values that are in the codec's form already."""
    return json.dumps(fields, separators=(",", ":"))


def _outcome(body: Body, child_id: str, tree: Any) -> Outcome:
    if tree["status"] == "COMPLETED":
        return Outcome(ok=True, value=body.decode(tree.get("result")), child=child_id)
    about = (str(tree["status"]), str(tree.get("type", "")), str(codec.decode(tree.get("message", ""))))
    return Outcome(ok=False, error=ChildFailed(child_id, *about), child=child_id)


# What both the body and its re-driver look at.


def ends_of(engine: Engine, ids: Sequence[str]) -> dict[str, Event | None]:
    """The last event of each that has ended, None for one that lives; one that is gone is left out."""
    return engine.store.ended(ids)


def enough(ends: Mapping[str, Event | None], wait: Wait) -> bool:
    """Tell if a wait for children is over. A child that is gone has ended."""
    over = [child for child in wait.children if child not in ends or ends[child] is not None]
    return bool(over) if wait.mode == "any" else len(over) == len(wait.children)


def finished_wait(engine: Engine, fold: Fold) -> Wait | None:
    """A wait of the newest park that its children's ends have answered."""
    for wait in fold.pending_waits():
        if wait.on == ON_CHILD and enough(ends_of(engine, wait.children), wait):
            return wait
    return None
