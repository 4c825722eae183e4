"""The conditional fence: an answer takes the token only while its park is unanswered, and nobody is fenced out in vain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from loom_django import FlowContext, StepContext, flow, signals, tool
from loom_django.engine import answers
from loom_django.engine.core import random_token
from loom_django.engine.journal import Journal
from loom_django.engine.outside import note, open_journal
from loom_django.engine.run import run_execution
from loom_django.errors import (
    ExecutionClosedError,
    OpenTransactionError,
    ResumeContendedError,
    ResumeRefusedError,
    StaleFenceError,
    VerdictRefusedError,
)
from loom_django.kernel.events import Event, Kind, pack
from loom_django.kernel.fold import fold
from loom_django.kernel.projection import project
from loom_django.kernel.state import Status
from loom_django.runtime import Handle
from loom_django.services import operators
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.redrive import ArrivalRedriver, Told
from loom_django.services.timers import HOLD, MAX_TRIES, PUT_OFF, TimerService
from loom_django.stores.base import READY, Acquired, Commit, TimerRow
from tests.engine.conftest import World

Meddle = Callable[[], object]
CrashAt = Callable[[str, str], None]


class Meddler:
    """Has somebody else act between the store calls of the call that is under test."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.store = world.engine.store
        self.monkeypatch = monkeypatch
        self.calls: list[str] = []
        self.meddling = False

    def before(self, call: str, act: Meddle, *, times: int = 1) -> None:
        """Act before the next calls of that name, as somebody whose own calls are not meddled with."""
        honest = getattr(self.store, call)
        left = [times]

        def meddled(*args: Any, **kwargs: Any) -> Any:
            if not self.meddling and left[0]:
                left[0] -= 1
                self.meddling = True
                try:
                    act()
                finally:
                    self.meddling = False
            return honest(*args, **kwargs)

        self.monkeypatch.setattr(self.store, call, meddled)

    def count(self, call: str) -> None:
        """Note the calls of that name that nobody made in between."""
        honest = getattr(self.store, call)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.meddling:
                self.calls.append(call)
            return honest(*args, **kwargs)

        self.monkeypatch.setattr(self.store, call, counted)


@pytest.fixture
def meddler(world: World, monkeypatch: pytest.MonkeyPatch) -> Meddler:
    return Meddler(world, monkeypatch)


def asks(*names: str) -> Any:
    """A flow that suspends on each of the names in turn and returns the answers."""

    @flow("f.asks")
    def body(ctx: FlowContext) -> list[Any]:
        return [ctx.suspend(name) for name in names]

    return body


def asked(world: World, *names: str, fenced: bool = True) -> Handle[Any]:
    """An execution that is parked on the first of the names; ``fenced`` was the one that ran it."""
    body = asks(*names).using(execution_id="x")
    if fenced:
        world.engine.store.acquire_fence("x")  # an id with a token behind it starts under the next one
    handle: Handle[Any] = body.start()
    assert world.engine.store.fence("x") == (2 if fenced else 0)
    return handle


def token(world: World) -> int:
    return world.engine.store.fence("x")


def fences(world: World) -> list[int | None]:
    """The token that each event carries."""
    return [event.fence for event in world.loom.history("x")]


def append_app_event(world: World) -> None:
    """An event of the application's, by whoever holds the token."""
    events = world.loom.history("x")
    event = Event("x", events[-1].sequence + 1, "stage", pack({"value": 1}), writer=9, is_kernel=False)
    world.engine.store.append(
        Commit("x", (event,), project(fold([*events, event])), fence=token(world) or None)
    )


def deny(world: World) -> None:
    note(world.engine, "x", Kind.EXECUTION_DENIED, {"act": "resume", "principal": "nobody"})


def refused_with_nothing_written(world: World, call: Callable[[], object]) -> ResumeRefusedError:
    """An answer is refused; log, token and rows are as they were."""
    before = world.loom.history("x"), token(world), world.engine.store.timers("x")
    with pytest.raises(ResumeRefusedError) as refused:
        call()
    assert (world.loom.history("x"), token(world), world.engine.store.timers("x")) == before
    return refused.value


# One park, answered where it was looked at.


@pytest.mark.parametrize("fenced", [True, False])
def test_an_answer_to_the_park_that_was_looked_at_takes_the_next_token(world: World, fenced: bool) -> None:
    """Whoever ran the body before can write nothing more; what follows carries the answer's token."""
    handle = asked(world, "A", fenced=fenced)
    park = world.loom.parked_at_sequence("x")
    assert park is not None
    before = token(world)
    world.loom.resume("x", event_type="A", payload=1, fence_if_parked_at=park)
    assert handle.result() == [1]
    assert token(world) == before + 1
    assert fences(world)[park:] == [before + 1, before + 1]


def test_an_answered_park_refuses(world: World) -> None:
    """Parked elsewhere by now, or ended: not-suspended, nothing written, no token taken."""
    asked(world, "A", "B")
    park = world.loom.parked_at_sequence("x")
    world.loom.resume("x", event_type="A", fence_if_parked_at=park, principal="anna")
    for _ in ("parked on B", "ended"):
        error = refused_with_nothing_written(
            world, lambda: world.loom.resume("x", event_type="A", fence_if_parked_at=park)
        )
        assert error.reason == "not-suspended"
        assert "by anna" in error.detail
        if world.state("x").status is Status.SUSPENDED:
            world.loom.resume("x", event_type="B")


@pytest.mark.parametrize("sequence", [0, 1, 3, 99])
def test_a_sequence_that_is_no_park_refuses(world: World, sequence: int) -> None:
    """Before the log, in it and behind it."""
    asked(world, "A")
    deny(world)
    error = refused_with_nothing_written(
        world, lambda: world.loom.resume("x", event_type="A", fence_if_parked_at=sequence)
    )
    assert error.reason == "not-suspended"
    assert f"Sequence {sequence} of its log is no park" in error.detail


def test_an_older_park_is_not_the_newest_of_the_same_name(world: World) -> None:
    """The answer to the first question is none to the second, though it has the same name."""
    asked(world, "A", "A")
    first = world.loom.parked_at_sequence("x")
    world.loom.resume("x", event_type="A", payload=1)
    second = world.loom.parked_at_sequence("x")
    assert second != first
    error = refused_with_nothing_written(
        world, lambda: world.loom.resume("x", event_type="A", payload=2, fence_if_parked_at=first)
    )
    assert error.reason == "not-suspended"
    assert f"it is parked at {second} now" in error.detail
    world.loom.resume("x", event_type="A", payload=2, fence_if_parked_at=second)
    assert world.loom.handle("x").result() == [1, 2]


# Others, between the look and the append.


def test_a_dead_acquirer_does_not_strand_the_park(world: World, meddler: Meddler) -> None:
    """Somebody took the token and died: the park carries an older one for good, and is answered all the same."""
    handle = asked(world, "A")
    world.engine.store.acquire_fence("x")
    world.engine.store.acquire_fence("x")
    meddler.count("append")
    world.loom.resume("x", event_type="A", fence_if_parked_at=2)
    assert handle.status == Status.COMPLETED
    assert token(world) == 5
    assert len(meddler.calls) == 3  # with the park's token, with the one that was told, and the end
    assert world.kinds("x").count("EXECUTION_RESUMED") == 1


def test_two_acquirers_that_die_meanwhile_are_outlasted(world: World, meddler: Meddler) -> None:
    """Each time the token that the store told is presented, not the park's."""
    handle = asked(world, "A")
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"), times=2)
    world.loom.resume("x", event_type="A", fence_if_parked_at=2)
    assert handle.status == Status.COMPLETED
    assert token(world) == 5


@pytest.mark.parametrize("at", [2, None])
def test_three_acquirers_that_die_meanwhile_contend(world: World, meddler: Meddler, at: int | None) -> None:
    """Not a refusal: the park is unanswered, and the same call may be made again."""
    handle = asked(world, "A")
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"), times=3)
    before = world.loom.history("x")
    with pytest.raises(ResumeContendedError) as contended:
        world.loom.resume("x", event_type="A", fence_if_parked_at=at)
    assert contended.value.attempts == 3
    assert contended.value.retryable
    assert not isinstance(contended.value, ResumeRefusedError)
    assert world.loom.history("x") == before
    assert token(world) == 5  # none of them taken here
    world.loom.resume("x", event_type="A", fence_if_parked_at=at)
    assert handle.status == Status.COMPLETED


@pytest.mark.parametrize("at", [2, None])
def test_an_answer_that_lands_in_between_is_heard_of(world: World, meddler: Meddler, at: int | None) -> None:
    """The rival's body runs under its token, and stays the one that does."""
    handle = asked(world, "A", "B")
    meddler.before(
        "append", lambda: world.loom.resume("x", event_type="A", payload="rival", principal="bert")
    )
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume("x", event_type="A", payload="late", fence_if_parked_at=at)
    assert refused.value.reason == ("no-such-wait" if at is None else "not-suspended")
    assert world.kinds("x").count("EXECUTION_RESUMED") == 1
    held = world.loom.history("x")[-1].fence
    assert token(world) == held  # the rival's; nobody has moved it since
    world.loom.resume("x", event_type="B", payload=2)
    assert handle.result() == ["rival", 2]


@pytest.mark.parametrize("asks_again", ["A", "B"])
def test_an_execution_that_was_begun_anew_in_between_is_judged_by_its_own_log(
    world: World, meddler: Meddler, asks_again: str
) -> None:
    """The one that was looked at has ended and is deleted; that of its id is as long."""

    @flow("f.anew")
    def anew(ctx: FlowContext) -> Any:
        return ctx.suspend(asks_again)

    def begin_anew() -> None:
        world.loom.resume("x", event_type="A")
        assert world.engine.store.delete_execution("x")
        anew.using(execution_id="x").start()

    asked(world, "A")
    meddler.before("append", begin_anew)
    with nullcontext() if asks_again == "A" else pytest.raises(ResumeRefusedError, match="not waiting for"):
        world.loom.resume("x", event_type="A", payload="mine")
    if asks_again == "B":
        world.loom.resume("x", event_type="B", payload="mine")
    assert world.loom.handle("x").result() == "mine"
    assert world.state("x").flow_id == "f.anew"


@pytest.mark.parametrize("what", [deny, append_app_event])
def test_a_note_in_between_costs_neither_the_answer_nor_a_second_token(
    world: World, meddler: Meddler, what: Callable[[World], None]
) -> None:
    """The answer is judged again behind it, and lands once, at a sequence of its own."""
    handle = asked(world, "A")
    meddler.count("append")
    meddler.before("append", lambda: what(world))
    world.loom.resume("x", event_type="A", fence_if_parked_at=2)
    assert handle.status == Status.COMPLETED
    assert meddler.calls == ["append"] * 3  # refused, behind the note, and the end
    assert token(world) == 3
    assert world.kinds("x")[2:] == [
        "EXECUTION_DENIED" if what is deny else "stage", "EXECUTION_RESUMED", "EXECUTION_COMPLETED"
    ]  # fmt: skip
    world.check("x")


def test_a_refusal_behind_a_note_is_found_before_the_append(world: World, meddler: Meddler) -> None:
    """What the caller judges by is judged again on what landed between look and append."""
    asked(world, "A")
    meddler.before("append", lambda: deny(world))

    def judge(seen: Any) -> None:
        if seen.last_sequence > 2:
            raise ResumeRefusedError("x", "stale-park")

    with pytest.raises(ResumeRefusedError):
        answers.resume(world.engine, "x", event_type="A", judge=judge, ownership=READY)
    assert world.kinds("x")[2:] == ["EXECUTION_DENIED"]


@pytest.mark.parametrize(
    "act",
    [
        lambda loom: loom.resume("x", event_type="Nope", fence_if_parked_at=2),
        lambda loom: loom.resume("x", event_type="__loom_timer__", fence_if_parked_at=2),
        lambda loom: loom.resume("x", event_type="A", correlation_key="k", fence_if_parked_at=2),
        lambda loom: loom.resume("x", event_type="Nope"),
        lambda loom: loom.resolve("x", "nothing", "fail"),
        lambda loom: loom.retry_error("x"),
        lambda loom: loom.retry_diverged("x"),
    ],
)
def test_a_refused_answer_takes_no_token(world: World, act: Callable[[Any], object]) -> None:
    """The fence is the last thing before the append."""
    asked(world, "A")
    refused_with_nothing_written(world, lambda: act(world.loom))


# Without a condition, and with a token of one's own.


def test_an_answer_to_what_nobody_fenced_takes_no_token(world: World) -> None:
    """It settles on the sequence, and the body runs without one."""
    handle = asked(world, "A", "B", fenced=False)
    for name in ("A", "B"):
        world.loom.resume("x", event_type=name)
    assert handle.status == Status.COMPLETED
    assert token(world) == 0
    assert set(fences(world)) == {None}


def test_an_answer_to_what_was_fenced_conditions_itself(world: World) -> None:
    """On its newest park, without being asked to; each answer under a token of its own."""
    handle = asked(world, "A", "B")
    for number, name in enumerate(("A", "B")):
        world.loom.resume("x", event_type=name)
        assert token(world) == 3 + number
    assert handle.status == Status.COMPLETED
    assert fences(world)[2:] == [3, 3, 4, 4]


def test_a_first_acquirer_between_look_and_append(world: World, meddler: Meddler) -> None:
    """The execution was never fenced when it was looked at: the append is stale, and the answer takes a token."""
    handle = asked(world, "A", fenced=False)
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"))
    world.loom.resume("x", event_type="A")
    assert handle.status == Status.COMPLETED
    assert token(world) == 2


def test_a_token_of_one_s_own_is_presented_as_it_is(world: World) -> None:
    """The newest may write, an older one is refused and writes nothing; none is taken."""
    handle = asked(world, "A")
    mine = world.engine.store.acquire_fence("x")
    before = world.loom.history("x")
    for stale in (0, mine - 1, mine + 1):
        with pytest.raises(StaleFenceError) as refused:
            world.loom.resume("x", event_type="A", fence=stale)
        assert refused.value.current == mine
        assert world.loom.history("x") == before
        assert token(world) == mine
    world.loom.resume("x", event_type="A", fence=mine)
    assert handle.status == Status.COMPLETED
    assert token(world) == mine


def test_the_condition_goes_before_a_token(world: World, meddler: Meddler) -> None:
    """With both, the park decides; the token is not presented, and being fenced out is not its end."""
    handle = asked(world, "A")
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"))
    world.loom.resume("x", event_type="A", fence=1, fence_if_parked_at=2)
    assert handle.status == Status.COMPLETED
    assert token(world) == 4
    error = refused_with_nothing_written(
        world, lambda: world.loom.resume("x", event_type="A", fence=4, fence_if_parked_at=2)
    )
    assert error.reason == "not-suspended"


# All that answers goes the same way.


@tool(idempotent=False, in_doubt_on=ConnectionError)
def wire(ctx: StepContext) -> str:
    raise ConnectionError


def parked_in_doubt(ctx: FlowContext) -> Any:
    return ctx.run(wire)


def parked_on_error(ctx: FlowContext) -> Any:
    if ctx.is_replaying or ctx.decide("first", lambda: True):
        ctx.emit("tried", 1)
    raise KeyError("a bug")


def parked_on_a_sleep(ctx: FlowContext) -> Any:
    ctx.sleep(60)


def parked_on_a_message(ctx: FlowContext) -> Any:
    return ctx.receive("m")


def parked_on_a_deadline(ctx: FlowContext) -> Any:
    ctx.suspend("never")


def wake_time(world: World) -> Any:
    return next(row.wake_at for row in world.engine.store.timers("x") if row.redrive is None)


ANSWERS: dict[str, tuple[Any, dict[str, Any], Callable[[World], object]]] = {
    "resolve": (
        parked_in_doubt,
        {},
        lambda w: answers.resolve(w.engine, "x", "wire", "fail", ownership=READY),
    ),
    "open_gate": (
        parked_on_error,
        {"on_error": "park"},
        lambda w: answers.open_gate(w.engine, "x", "__loom_error__", ownership=READY),
    ),
    "fire_timer": (
        parked_on_a_sleep,
        {},
        lambda w: answers.fire_timer(w.engine, "x", wake_time(w), READY),
    ),
    "deliver": (parked_on_a_message, {}, lambda w: answers.deliver(w.engine, "x", READY)),
    "cancel": (parked_on_a_sleep, {}, lambda w: answers.cancel(w.engine, "x")),
    "expire": (parked_on_a_deadline, {}, lambda w: answers.expire(w.engine, "x")),
}


@pytest.fixture
def answer(world: World, request: pytest.FixtureRequest) -> Callable[[], Any]:
    """One way to answer a park, and an execution ``x`` that is parked so, and was fenced."""
    func, options, act = ANSWERS[request.param]
    body = flow("f.answer", steps=[wire] if func is parked_in_doubt else [], **options)(func)
    world.engine.store.acquire_fence("x")
    body.using(execution_id="x").start()
    assert world.state("x").status is Status.SUSPENDED
    if request.param == "deliver":
        world.engine.store.send("x", name="m", message_id="1", body='"hello"')
    return lambda: act(world)


every_answer = pytest.mark.parametrize("answer", ANSWERS, indirect=True)


@every_answer
def test_each_kind_of_answer_takes_one_token_and_lands_once(world: World, answer: Callable[[], Any]) -> None:
    """Its events carry the token that it took."""
    appended = answer()
    assert token(world) == 3
    assert {event.fence for event in appended.events} == {3}
    world.check("x")


@every_answer
def test_each_kind_of_answer_outlasts_dead_acquirers(
    world: World, meddler: Meddler, answer: Callable[[], Any]
) -> None:
    """Two of them; with a third it is contended, and nothing was written."""
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"), times=3)
    before = world.loom.history("x")
    with pytest.raises(ResumeContendedError):
        answer()
    assert world.loom.history("x") == before
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"), times=2)
    assert answer().events


@every_answer
def test_no_kind_of_answer_fences_out_a_body_that_was_set_going(
    world: World, meddler: Meddler, answer: Callable[[], Any]
) -> None:
    """A rival's answer lands between look and append: its token stands, and its body may write."""
    park = world.state("x").park_sequence
    rival: list[Journal] = []
    meddler.before("append", lambda: rival.append(_answer_by_hand(world, park)))
    with suppress(ResumeRefusedError):
        answer()
    if "EXECUTION_CANCELLED" in world.kinds("x") or "EXECUTION_FAILED" in world.kinds("x"):
        return  # an end takes a running body's token on purpose
    rival[0].record(Kind.STEP_STARTED, {"step": "s", "tool": "t"})
    rival[0].land()
    assert world.kinds("x").count("EXECUTION_RESUMED") == 1


def _answer_by_hand(world: World, park: int | None) -> Journal:
    """A null answer under a token of its own; the journal of the body that it set going."""
    assert park is not None
    taken = world.engine.store.acquire_fence_if("x", fence=token(world), park_seq=park)
    assert isinstance(taken, Acquired)
    journal = journal_of(world)
    assert journal.fence == taken.fence
    journal.record(Kind.EXECUTION_RESUMED, {})
    journal.land(ownership=READY)
    return journal


@every_answer
def test_no_kind_of_answer_is_hurt_by_a_note(
    world: World, meddler: Meddler, answer: Callable[[], Any]
) -> None:
    """Two of them, each between look and append; one token all the same."""
    meddler.before("append", lambda: deny(world), times=2)
    assert answer().events
    assert token(world) == 3
    assert world.kinds("x").count("EXECUTION_DENIED") == 2
    world.check("x")


@pytest.mark.parametrize(
    ("func", "act", "taken"),
    [
        (parked_on_a_sleep, ANSWERS["fire_timer"][2], 1),
        (parked_on_a_message, ANSWERS["deliver"][2], 1),
        (parked_on_a_sleep, ANSWERS["cancel"][2], 1),
        (parked_on_a_sleep, ANSWERS["expire"][2], 1),
        (parked_on_error, ANSWERS["open_gate"][2], 0),
        (parked_in_doubt, ANSWERS["resolve"][2], 0),
    ],
)
def test_wakes_and_ends_take_a_token_of_what_nobody_fenced(
    world: World, func: Any, act: Callable[[World], Any], taken: int
) -> None:
    """They come from many processes at once; what a person answers settles on the sequence."""
    options: dict[str, Any] = {"on_error": "park"} if func is parked_on_error else {}
    flow("f.unfenced", steps=[wire] if func is parked_in_doubt else [], **options)(func).using(
        execution_id="x"
    ).start()
    world.engine.store.send("x", name="m", message_id="1", body='"hello"')
    assert token(world) == 0
    assert act(world).events
    assert token(world) == taken


def test_a_cancel_of_what_runs_takes_the_token_from_its_body(world: World) -> None:
    """Unconditionally: the owner, whoever it is, can append nothing more."""
    world.loom.dispatcher = WorkerDispatcher()
    handle = asked(world, "A", fenced=False)
    claim = world.engine.store.claim_ready(owner="w", token=1, ttl=60, limit=1, known=world.engine.known())[0]
    world.loom.cancel("x", reason="stop")
    assert handle.status == Status.CANCELLED
    assert token(world) == claim.fence + 1
    world.loom.cancel("x")  # answered, not an error
    assert token(world) == claim.fence + 1


def test_a_cancel_meets_an_answer_in_between(world: World, meddler: Meddler) -> None:
    """Parked when it was looked at, running when the token is to be taken: it ends what runs, fenced out first."""
    world.loom.dispatcher = WorkerDispatcher()
    asks("A").using(execution_id="x").start()
    run_ready(world)
    meddler.before("append", lambda: world.loom.resume("x", event_type="A"))
    world.loom.cancel("x")
    assert world.kinds("x")[-2:] == ["EXECUTION_RESUMED", "EXECUTION_CANCELLED"]
    resumed, cancelled = fences(world)[-2:]
    assert resumed is not None
    assert cancelled == token(world) == resumed + 1
    world.check("x")


def test_a_cancel_meets_an_end_in_between(world: World, meddler: Meddler) -> None:
    """What ended otherwise meanwhile is told as such, and stays."""
    asked(world, "A")
    meddler.before("append", lambda: world.loom.resume("x", event_type="A"))
    with pytest.raises(ExecutionClosedError):
        world.loom.cancel("x")
    assert world.kinds("x")[-1] == "EXECUTION_COMPLETED"


@pytest.mark.django_db(transaction=True)
def test_in_a_transaction_that_reads_from_one_snapshot_an_answer_is_refused(world: World) -> None:
    """On PostgreSQL above READ COMMITTED; elsewhere it joins the transaction, and goes with it."""
    asked(world, "A")
    if getattr(world.engine.store, "alias", None) is None:
        pytest.skip("the memory store joins no transaction of Django's")
    before = world.loom.history("x")
    acts: list[Callable[[], object]] = [
        lambda: world.loom.resume("x", event_type="A"),
        lambda: world.loom.resume("x", event_type="A", fence_if_parked_at=2),
        lambda: world.loom.cancel("x"),
        lambda: world.engine.store.acquire_fence_if("x", fence=2, park_seq=2),
    ]
    for level in ("read committed", "repeatable read", "serializable"):
        for act in acts:
            try:
                with transaction.atomic():
                    if connection.vendor == "postgresql":
                        connection.cursor().execute(f"set transaction isolation level {level}")
                    if connection.vendor == "postgresql" and level != "read committed":
                        with pytest.raises(OpenTransactionError, match=level.upper()):
                            act()
                    else:
                        act()
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            assert world.loom.history("x") == before
            assert token(world) == 2


# Two waits of one park.


@tool(idempotent=False)
def left(ctx: StepContext) -> str:
    return "ran left"


@tool(idempotent=False)
def right(ctx: StepContext) -> str:
    return "ran right"


def two_in_doubt(world: World, *, before_right: str = "") -> Handle[Any]:
    """An execution ``x`` of a flow with two steps in doubt in one park, and maybe a wait between them."""
    world.loom.dispatcher = WorkerDispatcher()

    @flow("f.doubts", steps=[left, right])
    def body(ctx: FlowContext) -> list[Any]:
        first = [ctx.run(left)]
        between = [ctx.suspend(before_right, timeout=60)] if before_right else []
        return [*first, *between, ctx.run(right)]

    return in_doubt(world, body, "left", "right")


def in_doubt(world: World, body: Any, *steps: str) -> Handle[Any]:
    """An execution whose process died in both steps, as in two branches, and which recovery has parked."""
    handle: Handle[Any] = body.using(execution_id="x").start()
    store = world.engine.store
    (claim,) = store.claim_ready(owner="dead", token=1, ttl=60, limit=1, known=world.engine.known())
    journal = journal_of(world)
    assert journal.fence == claim.fence
    for name in steps:
        fields: dict[str, Any] = {
            "step": name,
            "tool": name,
            "idempotent": False,
            "args": {"args": [], "kwargs": {}},
        }
        journal.record(Kind.STEP_STARTED, fields)
    journal.land()
    world.shift(timedelta(seconds=61))
    assert world.recover().recovered == 1
    assert [wait.correlation_key for wait in handle.waits] == list(steps)
    return handle


def journal_of(world: World) -> Journal:
    """The log as its owner would open it, with the newest token."""
    return open_journal(world.engine, world.engine.store.load("x"))


def run_ready(world: World) -> int:
    """Run what is ready, as a worker does; how many bodies that were."""
    claims = world.engine.store.claim_ready(
        owner="w", token=random_token(), ttl=60, limit=50, known=world.engine.known()
    )
    for claim in claims:
        run_execution(world.engine, claim.execution_id, token=claim.token, fence=claim.fence or None)
    return len(claims)


def verdict(world: World, step: str, **more: Any) -> Any:
    return world.loom.resolve("x", step, "completed-with-result", output=f"{step} by hand", **more)


@pytest.mark.parametrize("order", [("left", "right"), ("right", "left")])
def test_both_verdicts_within_moments_are_taken(world: World, order: tuple[str, str]) -> None:
    """Before any worker runs: none is refused, each is in the log once, and a second to either is refused."""
    handle = two_in_doubt(world)
    for step in order:
        verdict(world, step, principal=f"of {step}")
        with pytest.raises(VerdictRefusedError) as refused:
            verdict(world, step)
        assert refused.value.reason == "not-suspended"
    assert world.kinds("x").count("EXECUTION_RESUMED") == 1
    while run_ready(world):
        pass
    assert handle.result() == ["left by hand", "right by hand"]
    kinds = world.kinds("x")
    assert (kinds.count("EXECUTION_RESUMED"), kinds.count("MESSAGE_CONSUMED")) == (1, 1)
    assert {name: wait.answered_by for name, wait in world.state("x").waits.items()} == {
        "in-doubt:left:1": "of left", "in-doubt:right:1": "of right"
    }  # fmt: skip
    world.check("x")
    world.advance(timedelta(seconds=1))
    assert world.engine.store.timers("x") == []
    assert world.engine.store.message_names("x") == set()


@pytest.mark.parametrize("call", ["wakes", "inbox", "append"])
def test_a_verdict_while_the_body_looks_for_it(world: World, meddler: Meddler, call: str) -> None:
    """Before the count of wakes, between that and the look, and between the look and the park: taken each time."""
    handle = two_in_doubt(world)
    verdict(world, "left")
    meddler.before(call, lambda: verdict(world, "right"))
    assert run_ready(world) == 1
    assert handle.result() == ["left by hand", "right by hand"]
    kinds = world.kinds("x")
    assert (kinds.count("EXECUTION_RESUMED"), kinds.count("MESSAGE_CONSUMED")) == (1, 1)
    assert kinds.count("EXECUTION_SUSPENDED") == 1
    world.check("x")


@pytest.mark.parametrize("resolution", ["retry-fresh", "fail"])
def test_a_kept_verdict_of_each_kind(world: World, resolution: Any) -> None:
    """It does what it would have done as an answer to the park; the signal tells it once."""
    told: list[tuple[str, str]] = []

    def receiver(step_id: str, resolution: str, **_: Any) -> None:
        told.append((step_id, resolution))

    handle = two_in_doubt(world)
    signals.verdict_given.connect(receiver)
    try:
        verdict(world, "left")
        world.loom.resolve("x", "right", resolution)
        run_ready(world)
    finally:
        signals.verdict_given.disconnect(receiver)
    assert told == [("left", "completed-with-result"), ("right", resolution)]
    if resolution == "fail":
        assert handle.status == Status.FAILED
    else:
        assert handle.result() == ["left by hand", "ran right"]


def test_a_kept_answer_names_the_park_that_asked(world: World) -> None:
    """The form of the older park is an answer to what is pending still; to what is answered it is none."""
    two_in_doubt(world)
    park = world.loom.parked_at_sequence("x")
    for step in ("left", "right"):
        payload = {"step_id": step, "resolution": "completed-with-result", "output": 1}
        world.loom.resume("x", event_type="EffectInDoubtResolved", payload=payload, fence_if_parked_at=park)
    error = refused_with_nothing_written(
        world,
        lambda: world.loom.resume(
            "x",
            event_type="EffectInDoubtResolved",
            payload=payload | {"step_id": "left"},
            fence_if_parked_at=park,
        ),
    )
    assert error.reason == "not-suspended"
    run_ready(world)
    assert world.loom.handle("x").result() == [1, 1]


def test_a_verdict_on_an_older_park_whose_question_is_open(world: World) -> None:
    """The body has parked on it again, under a new sequence; the question is the same."""
    handle = two_in_doubt(world)
    first = world.loom.parked_at_sequence("x")
    verdict(world, "left")
    run_ready(world)
    second = world.loom.parked_at_sequence("x")
    assert second != first
    payload = {"step_id": "right", "resolution": "completed-with-result", "output": 2}
    world.loom.resume("x", event_type="EffectInDoubtResolved", payload=payload, fence_if_parked_at=first)
    run_ready(world)
    assert handle.result() == ["left by hand", 2]
    assert world.kinds("x").count("MESSAGE_CONSUMED") == 0


def test_an_answer_that_was_overtaken_on_its_way_is_not_thrown_away(world: World, meddler: Meddler) -> None:
    """The body parks on its wait before it is kept: it is given to the park."""
    handle = two_in_doubt(world)
    verdict(world, "left")
    meddler.before("send_unless_answered", lambda: run_ready(world))
    verdict(world, "right")
    run_ready(world)
    assert handle.result() == ["left by hand", "right by hand"]
    assert world.kinds("x").count("MESSAGE_CONSUMED") == 0


def test_of_two_verdicts_that_overtake_each_other_one_is_refused(world: World, meddler: Meddler) -> None:
    """The body parks again and a rival's verdict lands there before this one is kept: it hears of that."""
    two_in_doubt(world)
    verdict(world, "left")

    def rival() -> None:
        run_ready(world)
        verdict(world, "right", principal="bert")

    meddler.before("send_unless_answered", rival)
    with pytest.raises(VerdictRefusedError) as refused:
        verdict(world, "right", principal="anna")
    assert refused.value.answered_by == "bert"
    assert world.engine.store.message_names("x") == set()


def test_an_end_before_an_answer_is_kept_refuses_it(world: World, meddler: Meddler) -> None:
    """Nothing would ever take it."""
    two_in_doubt(world)
    verdict(world, "left")
    meddler.before("send_unless_answered", lambda: world.loom.cancel("x"))
    with pytest.raises(VerdictRefusedError) as refused:
        verdict(world, "right")
    assert refused.value.reason == "terminal"
    assert world.engine.store.message_names("x") == set()


def test_an_answer_that_is_never_kept_is_contended(world: World, meddler: Meddler) -> None:
    """Others park and answer behind every look."""
    two_in_doubt(world)
    verdict(world, "left")

    def others() -> None:
        journal = journal_of(world)
        gate = {"id": "error#1", "on": "__loom_error__"}
        journal.record(Kind.EXECUTION_SUSPENDED, {"waits": [gate]})
        journal.record(Kind.EXECUTION_RESUMED, {})
        journal.land(ownership=READY)

    meddler.before("send_unless_answered", others, times=3)
    with pytest.raises(ResumeContendedError):
        verdict(world, "right")
    assert world.engine.store.message_names("x") == set()


def doubt_behind_a_wait(world: World) -> Handle[Any]:
    """``right`` is in doubt and its verdict is kept, and the body has parked on something else before it."""
    handle = two_in_doubt(world, before_right="X")
    verdict(world, "left")
    verdict(world, "right", principal="anna")
    run_ready(world)
    assert [wait.on for wait in handle.waits] == ["X", "EffectInDoubtResolved"]
    return handle


def test_an_answer_to_a_wait_whose_answer_is_kept_is_refused(world: World) -> None:
    """Though the execution is parked, and nothing has taken it: the first one stands."""
    handle = doubt_behind_a_wait(world)
    error = refused_with_nothing_written(world, lambda: verdict(world, "right", principal="bert"))
    assert isinstance(error, VerdictRefusedError)
    assert error.answered_by == "anna"
    world.loom.resume("x", event_type="X", payload="x")
    while run_ready(world):
        pass
    assert handle.result() == ["left by hand", "x", "right by hand"]
    assert world.state("x").waits["in-doubt:right:1"].answered_by == "anna"


def test_a_kept_answer_is_delivered_to_a_park_on_something_else(world: World) -> None:
    """Its re-drive row finds the wait pending; what the park was on is parked on again, with its timeout."""
    handle = doubt_behind_a_wait(world)
    wake_at = {row.wake_at for row in world.engine.store.timers("x") if row.redrive is None}
    world.advance(timedelta(seconds=1))
    assert world.kinds("x")[-2:] == ["MESSAGE_CONSUMED", "EXECUTION_RESUMED"]
    assert world.engine.store.message_names("x") == set()
    run_ready(world)
    assert {row.wake_at for row in world.engine.store.timers("x")} == wake_at
    world.loom.resume("x", event_type="X", payload="x")
    run_ready(world)
    assert handle.result() == ["left by hand", "x", "right by hand"]


def test_a_kept_verdict_outlives_a_death_in_another_step(world: World, crash_at: CrashAt) -> None:
    """Recovery parks on the new doubt, and on the old one whose verdict is kept: that is applied, and once."""
    ran: list[str] = []

    @tool(idempotent=False)
    def first(ctx: StepContext) -> str:
        ran.append("first")
        return "first ran"

    @tool(idempotent=False)
    def second(ctx: StepContext) -> str:
        ran.append("second")
        return "second ran"

    @flow("f.death", steps=[first, second])
    def body(ctx: FlowContext) -> list[str]:
        return [ctx.run(first), ctx.run(second)]

    world.loom.dispatcher = WorkerDispatcher()
    handle = in_doubt(world, body, "first", "second")
    world.loom.resolve("x", "first", "retry-fresh")
    verdict(world, "second", principal="anna")
    crash_at("first", "after-effect")
    run_ready(world)
    world.shift(timedelta(seconds=61))
    assert world.recover().recovered == 1
    assert sorted(str(wait.correlation_key) for wait in handle.waits) == ["first", "second"]
    error = refused_with_nothing_written(world, lambda: verdict(world, "second", principal="bert"))
    assert isinstance(error, VerdictRefusedError)
    verdict(world, "first")
    while run_ready(world):
        pass
    assert handle.result() == ["first by hand", "second by hand"]
    assert ran == ["first"]
    world.check("x")


def test_an_open_doubt_can_be_settled_while_recovery_has_parked_on_another(
    world: World, crash_at: CrashAt
) -> None:
    """Every open question of an execution can be answered at any of its parks."""
    handle = two_in_doubt(world)
    world.loom.resolve("x", "left", "retry-fresh")
    crash_at("left", "after-effect")
    run_ready(world)
    world.shift(timedelta(seconds=61))
    world.recover()
    verdict(world, "right")
    verdict(world, "left")
    while run_ready(world):
        pass
    assert handle.result() == ["left by hand", "right by hand"]


def test_a_gate_beside_an_open_doubt_leaves_what_the_flow_waits_for(world: World) -> None:
    """The body has failed while a branch is in doubt: an answer to another branch is kept, not refused."""
    world.loom.dispatcher = WorkerDispatcher()
    broken: list[bool] = []

    @flow("f.gate", steps=[left, right], on_error="park")
    def body(ctx: FlowContext) -> dict[str, Any]:
        if broken:
            raise ValueError("broken")
        branches = {"x": suspends("X"), "z": suspends("Z"), "left": left.bind(), "right": right.bind()}
        return ctx.parallel(branches)

    def suspends(name: str) -> Any:
        return lambda ctx: ctx.suspend(name, timeout=600)

    handle = in_doubt(world, body, "left#1.left", "right#1.right")
    verdict(world, "left#1.left")
    run_ready(world)
    broken.append(True)
    world.loom.resume("x", event_type="X", payload="x")
    run_ready(world)
    assert [wait.on for wait in handle.waits] == ["__loom_error__", "EffectInDoubtResolved"]
    world.loom.resume("x", event_type="Z", payload="z")
    error = world.loom.history("x")[-1].data["error"]
    verdict(world, "right#1.right")  # settles the effect; the body waits for its own answer
    assert not run_ready(world)
    assert [wait.on for wait in handle.waits] == ["__loom_error__"]
    assert world.loom.history("x")[-1].data["error"] == error
    assert [wait.id for wait in world.state("x").waits.values() if wait.pending] == [
        "wait[1.z]:Z#1",
        "error#1",
    ]
    broken.clear()
    world.loom.retry_error("x")
    run_ready(world)
    assert handle.result() == {
        "x": "x", "z": "z", "left": "left#1.left by hand", "right": "right#1.right by hand"
    }  # fmt: skip
    world.check("x")


def test_a_verdict_that_was_kept_leaves_the_gate_shut(world: World) -> None:
    """It was given while the body ran, which then came to the gate: it settles its effect, and wakes nobody."""
    world.loom.dispatcher = WorkerDispatcher()
    broken: list[bool] = []

    @flow("f.kept.gate", steps=[left, right], on_error="park")
    def body(ctx: FlowContext) -> dict[str, Any]:
        if broken:
            raise ValueError("broken")
        return ctx.parallel({"left": left.bind(), "right": right.bind()})

    handle = in_doubt(world, body, "left#1.left", "right#1.right")
    for step in ("left#1.left", "right#1.right"):
        verdict(world, step)
    broken.append(True)
    run_ready(world)
    assert [wait.on for wait in handle.waits] == ["__loom_error__", "EffectInDoubtResolved"]
    answers.deliver(world.engine, "x", READY)
    assert [wait.on for wait in handle.waits] == ["__loom_error__"]
    assert not run_ready(world)
    broken.clear()
    world.loom.retry_error("x")
    run_ready(world)
    assert handle.result() == {"left": "left#1.left by hand", "right": "right#1.right by hand"}
    world.check("x")


def test_a_rehearsed_verdict_that_would_be_kept_is_not(world: World) -> None:
    """It says so, and stores nothing; where one is kept already it is refused as the act itself is."""
    two_in_doubt(world)
    verdict(world, "left")

    def act(*, dry_run: bool) -> operators.Done:
        return operators.resolve_step(
            world.loom, operators.Operator("shell:tests"), "x", "right", "fail", reason="r", dry_run=dry_run
        )

    assert (act(dry_run=True).kept, act(dry_run=True).events) == (True, ())
    assert world.engine.store.message_names("x") == set()
    assert act(dry_run=False).kept
    for dry_run in (True, False):
        with pytest.raises(VerdictRefusedError) as refused:
            act(dry_run=dry_run)
        assert refused.value.answered_by == "shell:tests"


def test_a_kept_answer_is_delivered_at_once_where_the_body_has_parked_on(
    world: World, meddler: Meddler
) -> None:
    """It does not wait for a timer loop."""
    two_in_doubt(world, before_right="X")
    verdict(world, "left")
    meddler.before("on_commit", lambda: run_ready(world))
    verdict(world, "right")
    assert world.kinds("x")[-3:] == ["EXECUTION_SUSPENDED", "MESSAGE_CONSUMED", "EXECUTION_RESUMED"]


def test_a_kept_verdict_of_an_operator_is_handed_on_as_every_act_is(world: World, meddler: Meddler) -> None:
    """The body parks elsewhere right after it was kept: where a loop was seen, it does not go on in the request."""
    two_in_doubt(world, before_right="X")
    verdict(world, "left")
    world.loom.dispatcher = None  # inline
    world.engine.store.beat("n", "timers")
    meddler.before("on_commit", lambda: run_ready(world))
    shell = operators.Operator("shell:tests")
    done = operators.resolve_step(world.loom, shell, "x", "right", "fail", reason="r")
    assert (done.kept, done.runs) == (True, "nobody")
    assert world.kinds("x")[-3:] == ["EXECUTION_SUSPENDED", "MESSAGE_CONSUMED", "EXECUTION_RESUMED"]
    assert world.engine.store.held("x") is None


@pytest.mark.parametrize("stale", [0, 1, 99])
def test_a_stale_token_keeps_nothing(world: World, stale: int) -> None:
    """It is refused as it is at a park."""
    two_in_doubt(world)
    verdict(world, "left")
    payload = {"step_id": "right", "resolution": "completed-with-result", "output": 1}
    with pytest.raises(StaleFenceError):
        world.loom.resume("x", event_type="EffectInDoubtResolved", payload=payload, fence=stale)
    assert world.engine.store.message_names("x") == set()
    world.loom.resume("x", event_type="EffectInDoubtResolved", payload=payload, fence=token(world))
    run_ready(world)
    assert world.loom.handle("x").result() == ["left by hand", 1]


# Wakes that are contended, without anybody who recovers.


def timers(world: World, **options: Any) -> TimerService:
    return TimerService(world.engine, lambda: world.loom.dispatcher, **options)


def receiving(world: World) -> Handle[Any]:
    """An execution ``x`` that waits for a message, one of which lies in its inbox, undelivered."""
    world.loom.dispatcher = WorkerDispatcher()

    @flow("f.receives")
    def body(ctx: FlowContext) -> Any:
        return ctx.receive("m")

    handle: Handle[Any] = body.using(execution_id="x").start()
    run_ready(world)
    world.engine.store.send("x", name="m", message_id="1", body='"hello"')
    return handle


def test_a_contended_wake_completes_by_its_redrive_row(world: World, meddler: Meddler) -> None:
    """No pass of recovery runs: the row is tried again, soon, and goes when it has served."""
    handle = receiving(world)
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"), times=6)
    service, tries = timers(world), []
    while service.tick() or world.engine.store.timers("x"):
        tries += [row.tries for row in world.engine.store.timers("x")]
        world.shift(timedelta(seconds=1))
    assert tries == [1, 2]
    run_ready(world)
    assert handle.result() == "hello"
    kinds = world.kinds("x")
    assert (kinds.count("EXECUTION_RESUMED"), kinds.count("MESSAGE_CONSUMED")) == (1, 1)


def test_a_contended_timer_backs_off_and_is_not_lost(world: World, meddler: Meddler) -> None:
    """A plain wake acquires at most three times a try, and not at all before its time."""
    world.loom.dispatcher = WorkerDispatcher()
    flow("f.sleeps")(parked_on_a_sleep).using(execution_id="x").start()
    run_ready(world)
    world.shift(timedelta(seconds=61))
    meddler.count("append")
    meddler.before("append", lambda: world.engine.store.acquire_fence("x"), times=3)
    service = timers(world)
    assert service.tick() is True
    assert service.tick() is False
    assert len(meddler.calls) == 3
    world.shift(timedelta(seconds=1))
    assert service.tick() is True
    assert world.state("x").status is Status.RUNNING
    assert world.engine.store.timers("x") == []


def two_waits(world: World) -> Handle[Any]:
    """An execution ``x`` that waits for X and for Y, which times out after 60 seconds, and then for End."""
    world.loom.dispatcher = WorkerDispatcher()

    @flow("f.two")
    def body(ctx: FlowContext) -> list[Any]:
        both = ctx.parallel(
            {"x": lambda ctx: ctx.suspend("X"), "y": lambda ctx: ctx.suspend("Y", timeout=60)}
        )
        return [*both.values(), ctx.suspend("End")]

    handle: Handle[Any] = body.using(execution_id="x").start()
    run_ready(world)
    return handle


def test_a_wake_that_is_owed_anew_while_its_row_is_judged_stays(world: World, meddler: Meddler) -> None:
    """The body was running when the timer loop looked, and has parked on that wait again before the row goes."""
    handle = two_waits(world)
    world.loom.resume("x", event_type="X")
    world.shift(timedelta(seconds=61))
    meddler.before("retire", lambda: run_ready(world))
    service = timers(world)
    assert service.tick() is True
    assert [wait.on for wait in handle.waits] == ["Y"]
    assert service.tick() is True
    assert world.kinds("x")[-2:] == ["TIMER_FIRED", "EXECUTION_RESUMED"]


def test_a_kept_answer_takes_the_wake_of_its_timeout_along(world: World) -> None:
    """Nothing is owed to a wait that has its answer."""
    handle = two_waits(world)
    world.loom.resume("x", event_type="X")
    (owed,) = world.engine.store.timers("x")
    world.loom.resume("x", event_type="Y")
    run_ready(world)
    assert [wait.on for wait in handle.waits] == ["End"]
    assert owed.wake_at not in {row.wake_at for row in world.engine.store.timers("x")}


def test_a_message_takes_the_wake_of_its_timeout_along(world: World) -> None:
    """Delivered to a park: nothing is owed to a wait that has its answer."""
    world.loom.dispatcher = WorkerDispatcher()

    @flow("f.timed")
    def body(ctx: FlowContext) -> Any:
        return ctx.receive("m", timeout=60)

    body.using(execution_id="x").start()
    run_ready(world)
    (owed,) = world.engine.store.timers("x")
    world.loom.send("x", "m")
    assert world.state("x").status is Status.RUNNING
    assert owed.wake_at not in {row.wake_at for row in world.engine.store.timers("x")}


def test_branches_park_on_the_count_of_whoever_looked_first(world: World, meddler: Meddler) -> None:
    """What comes between the looks of two branches refuses the park of both, and whoever missed it looks again."""
    world.loom.dispatcher = WorkerDispatcher()

    @flow("f.branches")
    def body(ctx: FlowContext) -> dict[str, Any]:
        return ctx.parallel({"first": lambda ctx: ctx.receive("m"), "second": lambda ctx: ctx.receive("n")})

    def send_before_the_second_look() -> None:
        looks.append(len(looks))
        if len(looks) == 2:
            world.engine.store.send("x", name="m", message_id="1", body='"hello"')

    looks: list[int] = []
    handle = body.using(execution_id="x").start()
    meddler.before("wakes", send_before_the_second_look, times=2)
    run_ready(world)
    assert world.kinds("x")[1:] == ["MESSAGE_CONSUMED", "EXECUTION_SUSPENDED"]
    assert [wait.correlation_key for wait in handle.waits] == ["n"]


class OfTheTests:
    """A re-driver that answers as it is told, and notes what it was shown."""

    name = "of the tests"

    def __init__(self, *told: Told | Exception) -> None:
        self.told = list(told)
        self.shown: list[str] = []

    def redrive(self, execution_id: str) -> Told:
        self.shown.append(execution_id)
        told = self.told.pop(0) if self.told else "noop"
        if isinstance(told, Exception):
            raise told
        return told


def test_a_redrive_row_is_shown_to_each_until_one_has_something_to_say(world: World) -> None:
    """Whoever is contended, or breaks, keeps it; done or nothing to do lets it go."""
    handle = asked(world, "A")
    store = world.engine.store
    first = OfTheTests("noop", "contended", ValueError("broken"), "done")
    second = OfTheTests("contended", "noop", "done")
    service = timers(world, redrivers=(first, second))
    store.schedule(TimerRow("x", store.now(), redrive=0))
    tries = []
    for _ in range(4):
        assert service.tick() is True
        tries.append([row.tries for row in store.timers("x")])
        world.shift(timedelta(seconds=30))
    assert tries == [[1], [2], [3], []]
    assert (len(first.shown), len(second.shown)) == (4, 1)
    store.schedule(TimerRow("x", store.now(), redrive=0))
    service = timers(world, redrivers=(OfTheTests(), OfTheTests()))
    assert service.tick() is True
    assert store.timers("x") == []
    assert handle.status == Status.SUSPENDED


def test_an_exhausted_wake_is_reported_once_and_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log and one signal; the row stays, and serves when nobody is in its way any more."""
    handle = receiving(world)
    store = world.engine.store
    told: list[tuple[str, int, int]] = []

    def receiver(execution_id: str, attempts: int, sequence: int, **_: Any) -> None:
        told.append((execution_id, attempts, sequence))

    class Stubborn(ArrivalRedriver):
        contended = True

        def redrive(self, execution_id: str) -> Told:
            return "contended" if self.contended else super().redrive(execution_id)

    stubborn = Stubborn(world.engine, lambda: world.loom.dispatcher)
    service = timers(world, redrivers=(stubborn,))
    signals.redrive_exhausted.connect(receiver)
    try:
        for number in range(1, MAX_TRIES + 3):
            assert service.tick() is True
            assert [row.tries for row in store.timers("x")] == [number]
            world.shift(timedelta(seconds=PUT_OFF if number >= MAX_TRIES else 31))
    finally:
        signals.redrive_exhausted.disconnect(receiver)
    assert told == [("x", MAX_TRIES, 2)]
    lines = [record for record in caplog.records if record.name == "loom_django.timers"]
    assert [line.getMessage().count("could not be woken") for line in lines] == [1]
    stubborn.contended = False
    assert service.tick() is True
    run_ready(world)
    assert handle.result() == "hello"
    assert store.timers("x") == []


def test_a_node_without_redrivers_leaves_such_rows_and_serves_what_is_behind_them(world: World) -> None:
    """Two hundred of them in front of a plain wake, in one small batch."""
    world.loom.dispatcher = WorkerDispatcher()
    flow("f.sleeps")(parked_on_a_sleep).using(execution_id="x").start()
    run_ready(world)
    store = world.engine.store
    long_ago = store.now() - timedelta(days=1)
    for number in range(200):
        store.schedule(TimerRow("x", long_ago + timedelta(seconds=number), redrive=0))
    world.shift(timedelta(seconds=61))
    service = timers(world, redrivers=(), limit=1)
    while service.tick():
        pass
    assert service.fired == 1
    assert world.kinds("x")[-2:] == ["TIMER_FIRED", "EXECUTION_RESUMED"]
    assert len(store.timers("x")) == 200
    assert {row.not_before for row in store.timers("x")} == {None}
    world.shift(timedelta(seconds=HOLD))
    service = timers(world)
    while service.tick():
        pass
    assert store.timers("x") == []
