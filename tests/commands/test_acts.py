"""The acts as commands: what they print, what they append, and the exit code of a refusal."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.core.management import CommandError, call_command

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import _clean_slate, diverged, in_doubt, kinds, make_user, put_off, question

__all__ = ["_clean_slate"]

pytestmark = pytest.mark.django_db(transaction=True)


def run(name: str, *args: Any) -> str:
    out = io.StringIO()
    call_command(name, *args, stdout=out)
    return out.getvalue()


def refused(name: str, *args: Any) -> tuple[int, str]:
    """The exit code and the message of a command that does not do it."""
    with pytest.raises(CommandError) as caught:
        run(name, *args)
    return caught.value.returncode, str(caught.value)


def test_a_verdict_is_given_at_the_shell():
    """Without --user whoever is at the shell is trusted, and named so in the log."""
    in_doubt("order-1")
    out = run("loom_resolve", "order-1", "transfer", "--completed", '"tx-7"', "--reason", "seen at the bank")
    [resumed] = loom.history("order-1", kinds=["EXECUTION_RESUMED"])
    assert f"appended event {resumed.sequence} EXECUTION_RESUMED to order-1" in out
    assert resumed.data["principal"].startswith("shell:")
    assert resumed.data["reason"] == "seen at the bank"
    assert loom.state("order-1").result == "tx-7"


def test_a_fresh_retry_tells_the_new_key():
    """The key that the provider will see next is printed."""
    in_doubt("order-1")
    flows.bank.append("tx-8")
    out = run("loom_resolve", "order-1", "transfer", "--retry-fresh", "--reason", "never arrived")
    assert "order-1:transfer:r1" in out
    assert loom.state("order-1").result == "tx-8"


def test_an_execution_is_moved_to_other_code():
    """A rehearsal prints the replay check first; what does not pass is a refusal; an answer goes along."""
    flows.ask.using(execution_id="x").start()
    about = ("--reason", "release 2", "--event", "Approval", "--payload", "7")
    refused_as = refused("loom_resume_as", "x", "nap", *about)
    assert refused_as[0] == 1
    assert "step 'label' (1 recorded step) is not declared" in refused_as[1]
    out = run("loom_resume_as", "x", "ask", "--flow-version", "1", *about, "--dry-run")
    assert "replay check: passed, 1 recorded steps" in out
    assert "would append event 5 EXECUTION_MIGRATED to x" in out
    assert "EXECUTION_MIGRATED" not in kinds("x")
    assert "appended event 6 EXECUTION_RESUMED" in run("loom_resume_as", "x", "ask", *about)
    assert loom.state("x").result == [7]
    assert refused("loom_resume_as", "x", "nobody", *about)[0] == 1


def test_a_verdict_may_be_a_failure():
    """The text of --fail is the failure's message."""
    in_doubt("order-1")
    run("loom_resolve", "order-1", "transfer", "--fail", "account closed", "--reason", "the bank said so")
    state = loom.state("order-1")
    assert state.status == Status.FAILED
    assert state.error
    assert state.error["message"] == "account closed"


def test_a_rehearsal_appends_nothing():
    """--dry-run says what would be appended, and to which place."""
    sequence = in_doubt("order-1")
    before = kinds("order-1")
    out = json.loads(
        run(
            "loom_resolve",
            "order-1",
            "transfer",
            "--retry-fresh",
            "--reason",
            "x",
            "--dry-run",
            "--format",
            "json",
        )
    )
    assert out["events"] == [{"sequence": sequence + 2, "kind": "EXECUTION_RESUMED"}]
    assert (out["dry_run"], out["fresh_key"]) == (True, "order-1:transfer:r1")
    assert kinds("order-1") == before


def test_a_second_verdict_is_refused_with_the_first_ones_author():
    """Exit code 1, nothing appended, and the message says who answered."""
    in_doubt("order-1")
    args = ("loom_resolve", "order-1", "transfer", "--completed", "1", "--reason", "r")
    run(*args)
    before = kinds("order-1")
    code, message = refused(*args)
    assert code == 1
    assert 'Step "transfer" was answered by shell:' in message
    assert kinds("order-1") == before


def test_another_question_is_refused():
    """--park-sequence names the question; the same step in doubt anew is another one."""
    old = in_doubt("order-1")
    run("loom_resolve", "order-1", "transfer", "--retry-fresh", "--reason", "r")
    assert question("order-1") != old
    code, message = refused(
        "loom_resolve",
        "order-1",
        "transfer",
        "--completed",
        "1",
        "--reason",
        "r",
        "--park-sequence",
        str(old),
    )
    assert (code, "is over" in message) == (1, True)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["transfer", "--completed", "tx-7", "--reason", "r"], "double quotes"),  # no JSON
        (["transfer", "--completed", "NaN", "--reason", "r"], "NaN is not JSON"),
        (["transfer", "--retry-fresh", "--reason", "  "], "needs a reason"),
        (["transfer", "--retry-fresh"], "--reason"),  # argparse says so
        (["transfer", "--reason", "r"], "one of the arguments"),
        (["transfer", "--retry-fresh", "--fail", "x", "--reason", "r"], "not allowed with"),
        (["transfer", "--retry-fresh", "--reason", "r", "--user", "nobody"], "no user 'nobody'"),
    ],
)
def test_misuse_is_told_apart_from_a_refusal(args, says):
    """Exit code 2 and what is wrong; nothing is appended."""
    in_doubt("order-1")
    before = kinds("order-1")
    with pytest.raises(CommandError, match=says) as caught:
        run("loom_resolve", "order-1", *args)
    assert caught.value.returncode in (1, 2)  # argparse exits with 2 by itself when it is not called by code
    assert kinds("order-1") == before


def test_misuse_has_the_exit_code_2():
    """What the command itself finds wrong with its arguments."""
    in_doubt("order-1")
    assert refused("loom_resolve", "order-1", "transfer", "--completed", "tx", "--reason", "r")[0] == 2
    assert refused("loom_resume", "order-1", "--event", "A", "--payload", "{", "--reason", "r")[0] == 2
    assert refused("loom_cancel", "order-1", "--reason", "r", "--user", "nobody")[0] == 2
    assert refused("loom_cancel", "order-1", "--reason", " ")[0] == 2


def test_a_named_user_needs_the_permission():
    """--user acts with that user's permissions; the refusal stands in the log once."""
    in_doubt("order-1")
    make_user("ben", "view_execution")
    args = ("loom_cancel", "order-1", "--reason", "r", "--user", "ben")
    for _ in range(2):
        code, message = refused(*args)
        assert (code, "loom.cancel_execution" in message) == (1, True)
    assert kinds("order-1").count("EXECUTION_DENIED") == 1


def test_a_named_user_with_the_permission_is_the_principal():
    """The log names the user, not the shell."""
    in_doubt("order-1")
    make_user("anna", "cancel_execution")
    run("loom_cancel", "order-1", "--reason", "wrong order", "--user", "anna")
    [cancelled] = loom.history("order-1", kinds=["EXECUTION_CANCELLED"])
    assert (cancelled.data["principal"], cancelled.data["reason"]) == ("anna", "wrong order")


def test_a_second_cancel_is_answered():
    """Cancelling what is cancelled is no error and appends nothing."""
    in_doubt("order-1")
    run("loom_cancel", "order-1", "--reason", "r")
    before = kinds("order-1")
    assert "cancelled already" in run("loom_cancel", "order-1", "--reason", "r")
    assert kinds("order-1") == before


def test_a_wait_is_answered_at_the_shell():
    """The payload's JSON is what the flow gets."""
    flows.ask.using(execution_id="ask-1").start("k")
    run(
        "loom_resume",
        "ask-1",
        "--event",
        "Approval",
        "--payload",
        '{"by": 10000000000000000000000}',
        "--reason",
        "r",
    )
    assert loom.handle("ask-1").result() == [{"by": 10**22}]


def test_a_reserved_wait_is_not_answered_by_a_resume():
    """A verdict has its own act and its own permission."""
    in_doubt("order-1")
    code, message = refused("loom_resume", "order-1", "--event", "EffectInDoubtResolved", "--reason", "r")
    assert (code, "its own act" in message) == (1, True)


def test_an_error_is_retried_at_the_shell():
    """After the fix the body runs again."""
    flows.bugs.append(ValueError("bug"))
    flows.buggy.using(execution_id="bug-1").start()
    assert loom.state("bug-1").parked
    run("loom_retry_error", "bug-1", "--reason", "fixed")
    assert loom.handle("bug-1").result() == "fine"
    assert refused("loom_retry_error", "bug-1", "--reason", "again")[0] == 1


def test_a_divergence_is_retried_at_the_shell():
    """After the fix the body runs again; what was answered stays answered."""
    diverged("shifted-1")
    run("loom_retry_diverged", "shifted-1", "--reason", "rolled back")
    assert loom.handle("shifted-1").result() == "fine"
    assert refused("loom_retry_diverged", "shifted-1", "--reason", "again")[0] == 1


@pytest.mark.parametrize("name", ["loom_cancel", "loom_retry_error", "loom_retry_diverged", "loom_history"])
def test_an_unknown_execution_is_said_to_be_unknown(name):
    """Exit code 1 and the id."""
    args = [] if name == "loom_history" else ["--reason", "r"]
    code, message = refused(name, "nobody-knows", *args)
    assert (code, "nobody-knows" in message) == (1, True)


def test_a_history_is_printed_for_people():
    """One line an event, with what it is about."""
    in_doubt("order-1")
    lines = run("loom_history", "order-1").splitlines()
    assert [line.split()[0] for line in lines] == [str(n) for n in range(1, len(lines) + 1)]
    assert "EXECUTION_STARTED" in lines[0]
    assert "step='transfer'" in lines[1]
    assert "waits='EffectInDoubtResolved (transfer)'" in lines[-1]
    flows.clan.using(execution_id="clan").start(["ada"])
    told = run("loom_history", "clan")
    assert "child='clan/clan#1'" in told
    assert "waits='CHILD_DONE'" in told
    assert "error='builtins.ValueError: nobody of that name'" in run("loom_history", "clan/clan#1")
    flows.goes_on.using(execution_id="c").start(3)
    assert "successor='c~2'" in run("loom_history", "c")


def test_a_history_is_printed_for_machines():
    """jsonl is one object a line, json one list of the same; values are as they are recorded."""
    in_doubt("order-1", "DE02", 10**40)
    lines = [json.loads(line) for line in run("loom_history", "order-1", "--format", "jsonl").splitlines()]
    assert json.loads(run("loom_history", "order-1", "--format", "json")) == lines
    assert lines[0]["payload"] == loom.history("order-1")[0].data
    assert [line["sequence"] for line in lines] == list(range(1, len(lines) + 1))
    assert json.loads(run("loom_history", "order-1", "--after", "2", "--format", "json")) == lines[2:]


def described(name: str, *args: Any) -> Any:
    """What a command says to a machine."""
    return json.loads(run(name, *args, "--reason", "r", "--format", "json"))


def test_a_message_is_sent_at_the_shell():
    """It is taken by who waits for it, with the name of who sent it; the same id again is dropped."""
    flows.listen.using(execution_id="x").start()
    args = ("loom_send", "x", "carrier", "--payload", '{"status": 1}', "--message-id", "m")
    rehearsed = described(*args, "--dry-run")
    assert (rehearsed["message"], kinds("x")[-1]) == ("taken", "EXECUTION_SUSPENDED")
    assert "the flow waits for it" in run(*args, "--reason", "seen on paper")
    assert loom.handle("x").result() == {"status": 1}
    for kind in ("MESSAGE_CONSUMED", "EXECUTION_RESUMED"):
        [event] = loom.history("x", kinds=[kind])
        assert event.data["principal"].startswith("shell:")
        assert event.data["reason"] == "seen on paper"
    assert refused(*args, "--reason", "r")[0] == 1  # it has ended


def test_a_message_is_kept_until_it_is_wanted():
    """A name that nobody receives now is no slip: the flow may come to it."""
    flows.ask.using(execution_id="x").start()
    args = ("loom_send", "x", "later", "--message-id", "m")
    assert [described(*args)["message"], described(*args)["message"]] == ["kept", "known"]
    assert len(loom.store.inbox("x", "later")) == 1


def test_a_fork_is_made_at_the_shell():
    """Under the id that was given, once, with the steps before the one that was named."""
    in_doubt("x", twice=True)
    run("loom_resolve", "x", "transfer", "--completed", "1", "--reason", "r")
    args = ("loom_fork", "x", "--from-step", "second_transfer", "--new-id", "y")
    rehearsed = described(*args, "--dry-run")["started"]
    assert (rehearsed["created"], rehearsed["steps"]) == (True, ["transfer"])
    assert loom.store.status("y") is None
    assert "started y of pay version 1; steps kept: transfer" in run(*args, "--reason", "again")
    assert loom.state("y").frames["transfer"].output == 1
    lineage = loom.state("y").options["forked_from"]
    assert (lineage["execution"], lineage["step"], lineage["reason"]) == ("x", "second_transfer", "again")
    assert "was made before" in run(*args, "--reason", "r")
    assert refused("loom_fork", "x", "--from-step", "nowhere", "--reason", "r")[0] == 2
    assert refused(*args, "--flow-version", "9", "--reason", "r")[0] == 1


def test_a_failed_execution_is_run_again_at_the_shell():
    """As a new one, whose id is made up unless it is given."""
    flows.broken.using(execution_id="x").start("boom")
    assert described("loom_rerun", "x", "--dry-run")["started"]["execution_id"] == ""
    made = described("loom_rerun", "x")["started"]
    assert loom.state(made["execution_id"]).options["forked_from"]["execution"] == "x"
    flows.ask.using(execution_id="z").start()
    code, message = refused("loom_rerun", "z", "--reason", "r")
    assert (code, "has not failed" in message) == (2, True)


def test_a_wake_that_was_put_off_is_tried_at_the_shell():
    """Now, and not ten minutes later; what is not due is left alone."""
    put_off("x")
    assert described("loom_wake", "x", "--dry-run")["wakes"] == 1
    assert loom.state("x").parked
    assert "are tried now: 1" in run("loom_wake", "x", "--reason", "the code is back")
    assert loom.handle("x").result() == "awake"
    flows.nap.using(execution_id="z").start()
    code, message = refused("loom_wake", "z", "--reason", "r")
    assert (code, "no act brings that forward" in message) == (1, True)


def test_a_wake_that_fails_again_is_put_off_and_told_again(caplog, monkeypatch):
    """Whoever asked for it learns why; the row stays."""
    put_off("x")
    from loom_django.definitions import registry

    monkeypatch.setitem(registry._flows, "nap", {})
    run("loom_wake", "x", "--reason", "r")
    [row] = loom.store.timers("x")
    assert row.not_before is not None
    assert row.not_before > loom.store.now()
    assert [record.getMessage().startswith("a wake is put off") for record in caplog.records].count(True) == 1


def test_an_outcome_is_recorded_at_the_shell():
    """After the end only; with a step, the doubt is settled."""
    in_doubt("x")
    args = ("loom_record_outcome", "x", "paid", "--step", "transfer", "--payload", '{"tx": 7}')
    assert refused(*args, "--reason", "r")[0] == 2  # it has not ended: that takes a verdict
    loom.cancel("x")
    assert described(*args, "--dry-run")["events"] == [
        {"sequence": len(kinds("x")) + 1, "kind": "OUTCOME_RECORDED"}
    ]
    run(*args, "--reason", "seen at the bank")
    [noted] = loom.history("x", kinds=["OUTCOME_RECORDED"])
    assert (noted.data["outcome"], noted.data["reason"]) == ("paid", "seen at the bank")
    assert loom.state("x").in_doubt == ()
    assert refused(*args, "--reason", "r")[0] == 1


@pytest.mark.parametrize(
    ("args", "permission"),
    [
        (("loom_send", "x", "n"), "send_message"),
        (("loom_fork", "x", "--from-step", "transfer"), "fork_execution"),
        (("loom_rerun", "x"), "rerun_execution"),
        (("loom_wake", "x"), "wake_timer"),
        (("loom_record_outcome", "x", "paid"), "resolve_step"),
    ],
)
def test_a_user_without_the_permission_is_refused_before_anything_is_judged(args, permission):
    """Whether the act would be possible is none of their business; the attempt is recorded."""
    in_doubt("x")
    make_user("ben", "view_execution")
    code, message = refused(*args, "--reason", "r", "--user", "ben")
    assert (code, f"loom.{permission}" in message) == (1, True)
    assert kinds("x")[-1] == "EXECUTION_DENIED"


def test_who_may_do_what_is_listed():
    """Directly, by a group, or as a superuser; nobody who is inactive."""
    make_user("anna", "cancel_execution")
    ben = make_user("ben")
    group = Group.objects.create(name="night shift")
    group.permissions.set(Permission.objects.filter(codename__in=["cancel_execution", "wake_timer"]))
    ben.groups.add(group)
    User.objects.create_superuser("root", password="x")
    gone = make_user("gone", "wake_timer")
    gone.is_active = False
    gone.save()
    found = json.loads(run("loom_operators", "--format", "json"))
    assert found["loom.cancel_execution"] == [
        {"user": "anna", "by": ["directly"]},
        {"user": "ben", "by": ["group night shift"]},
        {"user": "root", "by": ["superuser"]},
    ]
    assert [row["user"] for row in found["loom.wake_timer"]] == ["ben", "root"]
    lines = run("loom_operators").splitlines()
    [line] = [line for line in lines if line.startswith("loom.wake_timer ")]
    assert line.endswith("ben (group night shift), root (superuser)")
    assert set(found) == {line.split()[0] for line in lines}
