"""The page of one execution: what its log says, in order and in words."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils.html import strip_tags

from loom_django.admin import show, timeline
from loom_django.admin.execution_page import LOG_PAGE
from loom_django.kernel.events import KERNEL_KINDS, Event, Kind, pack
from loom_django.models import Execution
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import client_of, diverged, in_doubt, kinds, url, verdict

SECOND = 1_000_000


Fact = tuple[str, dict[str, Any]]


def log_of(*facts: Fact) -> list[Event]:
    """Events from (kind, fields); a fact's time is in seconds."""
    return [
        Event(
            "x",
            place + 1,
            str(kind),
            pack({**fields, "at": round(fields["at"] * SECOND)}),
            is_kernel=kind in KERNEL_KINDS,
        )
        for place, (kind, fields) in enumerate(facts)
    ]


STARTED: Fact = (Kind.EXECUTION_STARTED, {"flow": "f", "version": 1, "at": 100})


def step(at: float, name: str = "a") -> Fact:
    return Kind.STEP_STARTED, {"step": name, "tool": name, "at": at}


def looks(lane: timeline.Lane) -> list[str]:
    return [segment.look for segment in lane.segments]


@pytest.mark.once
def test_a_lane_tells_the_life_of_a_step():
    """Failed tries with a tick each, an interruption, the doubt, and its end."""
    error = {"type": "E", "bases": [], "message": "m", "traceback": ""}
    [lane] = timeline.lanes_of(
        log_of(
            STARTED,
            step(100),
            (Kind.STEP_RETRYING, {"step": "a", "error": error, "at": 101}),
            step(102),
            step(103),  # its process died in between
            (Kind.EFFECT_INDOUBT, {"step": "a", "cause": "c", "key": "k", "at": 104}),
            (
                Kind.EXECUTION_SUSPENDED,
                {"waits": [{"id": "in-doubt:a:3", "on": "EffectInDoubtResolved", "key": "a"}], "at": 104},
            ),
            (Kind.EXECUTION_RESUMED, {"wait": "in-doubt:a:3", "event": "e", "principal": "anna", "at": 200}),
        )
    )
    assert looks(lane) == ["failed", "lost", "lost", "doubt"]
    assert [round(tick / SECOND) for tick in lane.ticks] == [101]
    assert lane.segments[-1].end == 200 * SECOND
    assert "anna" in lane.segments[-1].note


@pytest.mark.once
def test_what_a_flow_emits_is_a_lane_of_its_kind():
    """A tick for each, of the newest ones only where there are very many."""
    own = [("progress", {"note": f"emit#{n}", "at": 100 + n}) for n in range(300)]
    lanes = timeline.lanes_of(log_of(STARTED, step(100), *own, ("other", {"at": 500})))
    assert [(lane.label, len(lane.ticks)) for lane in lanes] == [("a", 0), ("progress", 300), ("other", 1)]
    drawn = timeline.draw(lanes, 100 * SECOND, 600 * SECOND)
    assert [len(row.ticks) for row in drawn.rows] == [0, timeline.MOST_TICKS, 1]


@pytest.mark.once
def test_a_wait_is_a_lane_until_it_is_answered():
    """By a person, by the time, or by the end of the execution."""
    wait = {"id": "sleep#1", "on": "__loom_timer__", "wake_at": 160 * SECOND}
    facts = [STARTED, step(100), (Kind.STEP_COMPLETED, {"step": "a", "at": 101})]
    facts += [(Kind.EXECUTION_SUSPENDED, {"waits": [wait], "at": 101})]
    open_ = timeline.lanes_of(log_of(*facts))[1]
    assert (open_.is_wait, open_.segments[0].end) == (True, None)
    fired = timeline.lanes_of(log_of(*facts, (Kind.TIMER_FIRED, {"wait": "sleep#1", "at": 160})))[1]
    assert fired.segments[0].end == 160 * SECOND
    ended = timeline.lanes_of(log_of(*facts, (Kind.EXECUTION_CANCELLED, {"at": 130})))[1]
    assert ended.segments[0].end == 130 * SECOND


def test_a_parent_and_its_children_lead_to_each_other(console):
    """Each child with its status; what is removed stays a name; their number is told where they are waited for."""
    flows.clan.using(execution_id="clan").start(["ada", "eve"])
    page = console.get(url("execution_change", "clan")).content.decode()
    said = strip_tags(page)
    assert "3 children for" in " ".join(said.split())  # what it waits for
    assert "the child None" not in said
    links = [
        page.index(f'href="{url("execution_change", f"clan/{name}")}"')
        for name in ("ask#2", "ask#1", "clan#1")
    ]
    assert sorted(links) == links  # the newest first
    assert page.index("Failed") > links[-1]
    own = console.get(url("execution_changelist", parent_id__exact="clan"))
    assert own.context["cl"].result_count == 3
    assert (
        f'href="{url("execution_change", "clan")}"'
        in console.get(url("execution_change", "clan/ask#1")).content.decode()
    )
    Execution.objects.filter(pk="clan/ask#2")._raw_delete("default")
    assert "removed" in console.get(url("execution_change", "clan")).content.decode()


@pytest.mark.once
def test_idle_time_is_drawn_short():
    """Two days of waiting do not hide two seconds of work."""
    day = 86_400
    lanes = timeline.lanes_of(
        log_of(
            STARTED,
            step(100),
            (Kind.STEP_COMPLETED, {"step": "a", "at": 101}),
            step(100 + 2 * day, "b"),
            (Kind.STEP_COMPLETED, {"step": "b", "at": 101 + 2 * day}),
        )
    )
    drawing = timeline.draw(lanes, 100 * SECOND, (101 + 2 * day) * SECOND)
    first, second = (row.bars[0] for row in drawing.rows)
    assert first.width > 200
    assert second.width == pytest.approx(first.width, abs=1)
    assert second.x > first.end
    assert [length for _, length in drawing.breaks] == ["1 d 23 h"]
    assert max(bar.end for row in drawing.rows for bar in row.bars) <= drawing.width


@pytest.mark.once
@pytest.mark.parametrize("number", [0, 1, timeline.MOST_LANES, timeline.MOST_LANES + 5])
def test_a_drawing_has_a_bound(number):
    """The newest lanes are drawn, and how many were left out is said."""
    facts = [STARTED]
    for place in range(number):
        facts += [step(100, f"s{place}"), (Kind.STEP_COMPLETED, {"step": f"s{place}", "at": 100})]
    drawing = timeline.draw(timeline.lanes_of(log_of(*facts)), 100 * SECOND, 100 * SECOND)
    assert len(drawing.rows) == min(number, timeline.MOST_LANES)
    assert drawing.left_out == max(0, number - timeline.MOST_LANES)
    if number > timeline.MOST_LANES:
        assert drawing.rows[-1].label == f"s{number - 1}"


@pytest.mark.once
@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 ms"),
        (0.0421, "42 ms"),
        (1, "1 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (7200, "2 h"),
        (90_061, "1 d 1 h"),
    ],
)
def test_a_length_of_time_has_two_units_at_most(seconds, said):
    """Enough to tell apart what matters."""
    assert show.span(seconds) == said


@pytest.mark.django_db(transaction=True)
def test_the_drawing_says_in_text_what_it_shows(console):
    """A title and a description for the whole and a title for each bar; the table has the same rows."""
    in_doubt("x")
    page = console.get(url("execution_change", "x")).content.decode()
    assert '<title id="loom-timeline-title">' in page
    assert '<desc id="loom-timeline-desc">' in page
    assert "transfer: in doubt," in page
    assert "loom-step-in-doubt" in page


@pytest.mark.django_db(transaction=True)
def test_a_long_log_is_paged_by_sequence(console):
    """The newest page first; from there to the beginning and back without a gap."""
    flows.ask.using(execution_id="x").start(rounds=40)
    for _ in range(39):
        loom.resume("x", event_type="Approval", principal="anna")
    last = loom.state("x").last_sequence
    assert last > LOG_PAGE
    page = console.get(url("execution_change", "x"))
    seen = [row.event.sequence for row in page.context["log"].rows]
    assert seen == list(range(last - LOG_PAGE + 1, last + 1))
    older = page.context["log"].older
    page = console.get(url("execution_change", "x", after=older))
    first = [row.event.sequence for row in page.context["log"].rows]
    assert (first[0], first[-1] >= seen[0] - 1) == (1, True)
    newer = console.get(url("execution_change", "x", after=page.context["log"].newer)).context["log"]
    assert newer.rows[0].event.sequence == first[-1] + 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("after", ["-1", "x", "", "9" * 30, "²", "99999"])
def test_an_odd_place_in_the_log_breaks_nothing(console, after):
    """Whatever stands in the address."""
    in_doubt("x")
    assert console.get(url("execution_change", "x", after=after, kind="NOPE")).status_code == 200
    assert console.get(url("execution_change", "x", after=after)).status_code == 200


@pytest.mark.django_db(transaction=True)
def test_a_log_is_filtered_by_kind(console):
    """Only those events, in their order."""
    in_doubt("x")
    rows = console.get(url("execution_change", "x", kind="STEP_STARTED")).context["log"].rows
    assert [row.event.kind for row in rows] == ["STEP_STARTED"]


@pytest.mark.django_db(transaction=True)
def test_what_people_did_is_listed(console):
    """With name, reason and event."""
    from loom_django.kernel.state import Status

    console.post(url("execution_verdict", "x"), verdict(in_doubt("x")))
    assert loom.state("x").status == Status.COMPLETED
    page = console.get(url("execution_change", "x"))
    [row] = page.context["page"].acts
    assert row.principal == "anna"
    assert "seen at the bank" in page.content.decode()


@pytest.mark.django_db(transaction=True)
def test_an_unknown_execution_is_not_found(console):
    """404 on each page of it."""
    for name in ("change", "log", "verdict", "resume", "cancel", "retry_error", "retry_diverged", "recover"):
        assert console.get(url(f"execution_{name}", "nobody")).status_code == 404
        if name not in ("change", "log"):
            assert console.post(url(f"execution_{name}", "nobody"), {"reason": "r"}).status_code == 404


@pytest.mark.django_db(transaction=True)
def test_a_parked_error_is_shown_with_the_act_that_fits(console):
    """What the body raised, and the link to try again."""
    flows.bugs.append(KeyError("approved_by"))
    flows.buggy.using(execution_id="x").start()
    page = console.get(url("execution_change", "x")).content.decode()
    assert "KeyError" in page
    assert url("execution_retry_error", "x") in page


@pytest.mark.django_db(transaction=True)
def test_a_divergence_is_shown_with_what_was_skipped_and_the_act_that_fits(console):
    """The recorded step, what came instead, and the line of the flow; the list finds it."""
    diverged("x")
    flows.ask.using(execution_id="y").start()
    page = console.get(url("execution_change", "x")).content.decode()
    for part in (
        "Its code diverged from its log",
        ">label<",
        "the end of the flow",
        "flows.py:",
        "FlowDivergenceError",
    ):
        assert part in page
    assert url("execution_retry_diverged", "x") in page
    assert url("execution_retry_error", "x") not in page
    listed = console.get(url("execution_changelist"), {"waiting": "diverged"})
    assert [row.pk for row in listed.context["cl"].result_list] == ["x"]
    assert "its code diverged from its log" in listed.content.decode()


@pytest.mark.django_db(transaction=True)
def test_each_wait_has_its_own_answer(console):
    """Of several waits the link of one leads to the form for that one, and a timer says which wait it ends."""
    flows.split.using(execution_id="x", priority=3).start()
    page = console.get(url("execution_change", "x"))
    text = page.content.decode()
    links = [
        url("execution_resume", "x", wait="wait[1.ask]:Approval#1"),
        url("execution_resume", "x", wait="wait[1.clear]:Customs#1"),
        url("execution_verdict", "x", step="transfer#1.pay"),
    ]
    assert [address for _, address, _ in page.context["waits"]] == links
    assert [timer["what"] for timer in page.context["timers"]] == ["Approval"]
    assert "priority 3" in text

    form = console.get(links[1])
    assert form.context["form"].initial == {"question": "wait[1.clear]:Customs#1"}
    sent = {"question": "wait[1.clear]:Customs#1", "payload": "1", "reason": "r", "stage": "confirm"}
    assert console.post(links[1], sent).status_code == 302
    assert console.get(links[1]).status_code == 409


@pytest.mark.django_db(transaction=True)
def test_who_may_not_answer_sees_no_link_at_a_wait(ben):
    """The wait is told, and nothing more."""
    flows.split.using(execution_id="x").start()
    page = client_of(ben).get(url("execution_change", "x"))
    assert [address for _, address, _ in page.context["waits"]] == ["", "", ""]


def test_a_member_of_a_chain_links_to_its_neighbours(console: Any, db: None):
    """To the one that it continues, the one that it was continued as, and from further on to the first."""
    flows.goes_on.using(execution_id="x").start(1)
    expected = {
        "x": ["Continued as x~2"],
        "x~2": ["Continues x", "Continued as x~3"],
        "x~3": ["Continues x~2", "Continued as x~4", "First of the chain x"],
        "x~4": ["Continues x~3", "First of the chain x"],
    }
    for member, links in expected.items():
        response = console.get(url("execution_change", member))
        found = [f"{label} {strip_tags(link)}" for label, link in response.context["chain"]]
        assert found == links
        for label, link in response.context["chain"]:
            assert f"<dt>{label}</dt><dd>{link}</dd>" in response.content.decode()


@pytest.mark.django_db(transaction=True)
def test_a_budget_says_what_is_used_of_it(console):
    """On the page, in the list and in the form; a limit that is used up already is said there, and not written."""
    flows.agent.using(execution_id="x").start()
    words = "a higher limit of usd: 0.61 of 0.50 is used"
    address = url("execution_resume", "x", wait="budget:loop:usd#1")
    for place in (url("execution_change", "x"), url("execution_changelist"), address):
        assert words in console.get(place).content.decode()
    assert "The new limit, as JSON" in console.get(address).content.decode()
    sent = {"question": "budget:loop:usd#1", "payload": '{"limit": 0.6}', "reason": "r", "stage": "confirm"}
    before = kinds("x")
    refused = console.post(address, sent).content.decode()
    assert "the limit of usd must be above the 0.61 that are used" in refused
    assert kinds("x") == before
    flows.bank.append(2)
    assert console.post(address, {**sent, "payload": '{"limit": 5}'}).status_code == 302
    assert loom.handle("x").result() == "done"


def test_a_park_that_only_an_operator_ends_leads_to_the_act(console, ben):
    """For those who may do it; and its cause stands in the log."""
    diverged("shifted")
    act = f'class="loom-button" href="{url("execution_retry_diverged", "shifted")}"'
    assert act in console.get(url("execution_change", "shifted")).content.decode()
    page = client_of(ben).get(url("execution_change", "shifted")).content.decode()
    assert act not in page
    assert "FlowDivergenceError" in page[page.index('id="log"') :]
