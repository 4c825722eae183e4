"""Each act has a permission of its own; an attempt without it is refused and stands in the log once."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission

from loom_django.admin.acts import VIEWS
from loom_django.models import Execution
from loom_django.runtime import loom
from loom_django.services.operators import Act
from tests.admin import flows
from tests.admin.conftest import (
    ACTS,
    LOOK,
    client_of,
    diverged,
    in_doubt,
    kinds,
    make_user,
    put_off,
    question,
    url,
    verdict,
)

pytestmark = pytest.mark.django_db(transaction=True)


def _in_doubt() -> None:
    in_doubt("x")


def _waiting() -> None:
    flows.ask.using(execution_id="x").start()


def _on_error() -> None:
    flows.bugs.append(ValueError("bug"))
    flows.buggy.using(execution_id="x").start()


def _diverged() -> None:
    diverged("x")


def _verdict() -> dict[str, Any]:
    return verdict(question("x"))


def _answer() -> dict[str, Any]:
    return {"question": "wait:Approval#1", "payload": "1", "reason": "r", "stage": "confirm"}


def _reason() -> dict[str, Any]:
    return {"reason": "r", "stage": "confirm"}


def _listening() -> None:
    flows.listen.using(execution_id="x").start()


def _message() -> dict[str, Any]:
    return {**_reason(), "name": "carrier", "payload": "1", "message_id": "m-1"}


def _failed() -> None:
    flows.broken.using(execution_id="x").start("boom")


def _copy() -> dict[str, Any]:
    return {**_reason(), "new_id": "copy", "from_step": "label", "version": ""}


def _put_off() -> None:
    put_off("x")


def _cancelled() -> None:
    in_doubt("x")
    loom.cancel("x")


def _outcome() -> dict[str, Any]:
    return {**_reason(), "step": "transfer", "outcome": "paid", "payload": ""}


def _move() -> dict[str, Any]:
    return {**_answer(), "target": "ask@1", "strategy": "replay-check", "park": ""}


def _by(kind: str) -> Any:
    """Who stands in the event of that kind."""
    return lambda: [event.data["principal"] for event in loom.history("x", kinds=[kind])]


def _by_lineage() -> list[str]:
    return [loom.state("copy").options["forked_from"]["principal"]]


def _by_last_answer() -> list[str]:
    return [loom.history("x", kinds=["EXECUTION_RESUMED"])[-1].data["principal"]]


def _by_nobody() -> list[str]:
    """A wake that is tried again is no answer of a person's."""
    assert loom.state("x").result == "awake"
    return ["carl"]


# Act, page, how to bring an execution to where the act applies, what its form sends, whom the act names.
MATRIX = [
    pytest.param("resolve_step", "verdict", _in_doubt, _verdict, _by("EXECUTION_RESUMED"), id="verdict"),
    pytest.param("resume_execution", "resume", _waiting, _answer, _by("EXECUTION_RESUMED"), id="resume"),
    pytest.param(
        "retry_error", "retry_error", _on_error, _reason, _by("EXECUTION_RESUMED"), id="retry_error"
    ),
    pytest.param("cancel_execution", "cancel", _waiting, _reason, _by("EXECUTION_CANCELLED"), id="cancel"),
    pytest.param("send_message", "send", _listening, _message, _by("MESSAGE_CONSUMED"), id="send"),
    pytest.param("fork_execution", "fork", _waiting, _copy, _by_lineage, id="fork"),
    pytest.param("rerun_execution", "rerun", _failed, _copy, _by_lineage, id="rerun"),
    pytest.param("wake_timer", "wake", _put_off, _reason, _by_nobody, id="wake"),
    pytest.param("record_outcome", "outcome", _cancelled, _outcome, _by("OUTCOME_RECORDED"), id="outcome"),
    pytest.param("move_execution", "move", _waiting, _move, _by("EXECUTION_MIGRATED"), id="move"),
    pytest.param(
        "retry_diverged", "retry_diverged", _diverged, _reason, _by_last_answer, id="retry_diverged"
    ),
]


def _needed(act: str) -> str:
    return Act(act).permission.removeprefix("loom.")


@pytest.mark.parametrize(("act", "page", "prepare", "form", "named"), MATRIX)
def test_the_permission_allows_the_act_and_nothing_else(act, page, prepare, form, named, db):
    """With just this permission the act is done, under the name of who did it."""
    prepare()
    client = client_of(make_user("carl", *LOOK, _needed(act)))
    assert client.post(url(f"execution_{page}", "x"), form()).status_code == 302
    assert named() == ["carl"]
    [entry] = LogEntry.objects.all()
    assert (entry.user.get_username(), entry.object_id) == ("carl", "x")
    assert entry.get_change_message().startswith(act.replace("_", " "))


@pytest.mark.parametrize(("act", "page", "prepare", "form", "named"), MATRIX)
def test_a_preview_writes_nothing(act, page, prepare, form, named, db):
    """What the act would do is told, and nothing is done: neither to the log nor to what hangs on it."""
    prepare()
    client = client_of(make_user("carl", *LOOK, _needed(act)))
    before = kinds("x"), loom.store.timers("x"), loom.store.wakes("x"), Execution.objects.count()
    answer = client.post(url(f"execution_{page}", "x"), {**form(), "stage": "preview"})
    assert answer.status_code == 200
    assert "Confirm" in answer.content.decode()
    assert (kinds("x"), loom.store.timers("x"), loom.store.wakes("x"), Execution.objects.count()) == before
    assert LogEntry.objects.count() == 0


@pytest.mark.parametrize(("act", "page", "prepare", "form", "named"), MATRIX)
def test_without_the_permission_the_act_is_denied_once(act, page, prepare, form, named, db):
    """All other permissions do not help: a 403 page, one EXECUTION_DENIED for two attempts, nothing else."""
    prepare()
    client = client_of(make_user("carl", *LOOK, *(other for other in ACTS if other != _needed(act))))
    before, given = kinds("x"), form()
    for stage in ("confirm", "preview"):
        answer = client.post(url(f"execution_{page}", "x"), {**given, "stage": stage})
        assert answer.status_code == 403
        assert Act(act).permission in answer.content.decode()
    assert kinds("x") == [*before, "EXECUTION_DENIED"]
    denied = loom.history("x")[-1].data
    assert (denied["principal"], denied["act"], denied["permission"]) == ("carl", act, Act(act).permission)
    assert LogEntry.objects.count() == 0


@pytest.mark.parametrize(("act", "page", "prepare", "form", "named"), MATRIX)
def test_a_look_at_a_form_without_the_permission_writes_nothing(act, page, prepare, form, named, db):
    """The form is a 403 page too; only an attempt is recorded."""
    prepare()
    before = kinds("x")
    client = client_of(make_user("carl", *LOOK))
    assert client.get(url(f"execution_{page}", "x")).status_code == 403
    assert kinds("x") == before


@pytest.mark.parametrize(("act", "page", "prepare", "form", "named"), MATRIX)
def test_an_act_that_is_not_permitted_is_not_offered(act, page, prepare, form, named, db):
    """The page of the execution links the acts that apply and are permitted."""
    prepare()
    address = url(f"execution_{page}", "x")
    allowed = (
        client_of(make_user("carl", *LOOK, _needed(act))).get(url("execution_change", "x")).content.decode()
    )
    barred = client_of(make_user("dora", *LOOK)).get(url("execution_change", "x")).content.decode()
    assert f'href="{address}' in allowed
    assert f'href="{address}' not in barred


def test_a_denial_is_recorded_for_each_person_act_and_park(console):
    """Another person, another act or another park is another fact."""
    in_doubt("x")
    ben, dora = (client_of(make_user(name, *LOOK)) for name in ("ben", "dora"))
    for client in (ben, dora, ben):
        client.post(url("execution_cancel", "x"), _reason())
    ben.post(url("execution_verdict", "x"), _verdict())
    assert kinds("x").count("EXECUTION_DENIED") == 3

    console.post(url("execution_verdict", "x"), verdict(question("x"), "retry-fresh"))
    ben.post(url("execution_cancel", "x"), _reason())
    assert kinds("x").count("EXECUTION_DENIED") == 4


def test_a_denial_does_not_answer_the_question(console):
    """A verdict that was being filled in meanwhile is still good."""
    sequence = in_doubt("x")
    client_of(make_user("ben", *LOOK)).post(url("execution_cancel", "x"), _reason())
    assert console.post(url("execution_verdict", "x"), verdict(sequence)).status_code == 302
    assert loom.state("x").result == "tx-7"


PAGES = [
    ("execution_changelist", ()),
    ("in_doubt", ()),
    ("execution_change", ("x",)),
    ("execution_log", ("x",)),
    *((f"execution_{view.suffix}", ("x",)) for view in VIEWS),
    ("timer_changelist", ()),
    ("lease_changelist", ()),
]


@pytest.mark.parametrize(("name", "args"), PAGES)
def test_nothing_is_shown_without_the_permission_to_look(name, args, db):
    """A member of staff who may act but not look sees no page, and cannot act by guessing an address."""
    in_doubt("x")
    before = kinds("x")
    client = client_of(make_user("eve", *ACTS))
    assert client.get(url(name, *args)).status_code == 403
    assert client.post(url(name, *args), verdict(question("x"))).status_code in (403, 405)
    assert kinds("x") == before


@pytest.mark.parametrize(("name", "args"), PAGES)
def test_whoever_is_not_staff_is_sent_to_the_login(name, args, client, db):
    """As everywhere in the admin."""
    in_doubt("x")
    for answer in (client.get(url(name, *args)), client.post(url(name, *args), _reason())):
        assert answer.status_code == 302
        assert "/login/" in answer.url


@pytest.fixture
def held(settings):
    """An execution under the lease of a process that is gone."""
    settings.LOOM = {"DISPATCHER": "worker"}
    flows.ask.using(execution_id="x").start()
    assert loom.store.claim("x", owner="dead:1:a", token=7, ttl=3600)


def test_recovering_has_its_own_permission(held, db):
    """With it the holder is fenced out; without it the attempt is denied once."""
    carl = client_of(make_user("carl", *LOOK, "recover_execution"))
    dora = client_of(make_user("dora", *LOOK, *(act for act in ACTS if act != "recover_execution")))
    address = url("execution_recover", "x")
    assert f'href="{address}' in carl.get(url("execution_change", "x")).content.decode()
    assert f'href="{address}' not in dora.get(url("execution_change", "x")).content.decode()
    for _ in range(2):
        assert dora.post(address, _reason()).status_code == 403
    assert kinds("x").count("EXECUTION_DENIED") == 1
    preview = carl.post(address, {**_reason(), "stage": "preview"}).content.decode()
    assert "appends nothing" in preview
    assert loom.store.held("x")
    page = carl.post(address, _reason(), follow=True).content.decode()
    assert "taken over from its holder" in page
    assert loom.store.held("x") is None
    assert loom.store.fence("x") > 0
    assert "recover execution: r" in LogEntry.objects.get().get_change_message()
    assert carl.post(address, _reason()).status_code == 409  # nobody holds it now


def test_each_permission_has_the_name_of_its_act():
    """As the docs list them; what became of an effect is said by the same people before the end and after it."""
    named = {act: f"loom.{act.value}" for act in Act}
    assert {act: act.permission for act in Act} == {**named, Act.RECORD_OUTCOME: "loom.resolve_step"}
    shipped = Permission.objects.filter(content_type__app_label="loom").values_list("codename", flat=True)
    assert {act.permission.removeprefix("loom.") for act in Act} <= set(shipped)
