"""Messages that arrive while an execution hands over to its successor, again and again, from several senders."""

from __future__ import annotations

import signal
from collections import defaultdict

from loom_django.kernel import codec
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash.kit import Lab, check_history, eventually, history

# A thousand in the fault that this is about; what a tenth of them meets is the same, ten times less often.
MESSAGES = 160
SENDERS = 4
EACH = 10


def test_no_message_is_lost_or_doubled_in_a_hand_over(lab: Lab):
    """All are taken once, those of one sender in their order; none is refused; the chain comes to its end."""
    lab.run("start", "collects", "x", args=[MESSAGES, EACH])
    workers = [lab.spawn("command", "run_loom_worker", loom={"POLL_INTERVAL": 0.05}) for _ in range(2)]
    senders = [lab.spawn("send_many", "x", f"s{number}", MESSAGES // SENDERS) for number in range(SENDERS)]
    for sender in senders:
        assert sender.wait() == 0, sender.log
        assert sender.value == MESSAGES // SENDERS
    handle = loom.handle("x")
    eventually(
        lambda: handle.status is Status.COMPLETED, "the end of the chain", instead=lambda: handle.waits
    )
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log
    members = [member.id for member in loom.store.chain_members("x")]
    assert members == ["x", *(f"x~{link}" for link in range(2, MESSAGES // EACH + 1))]
    taken: dict[str, list[int]] = defaultdict(list)
    for member in members:
        check_history(member)
        for event in history(member):
            if event.kind == Kind.MESSAGE_CONSUMED:
                sender, number = codec.decode(event.data["payload"])
                taken[sender].append(number)
    assert taken == {f"s{number}": list(range(MESSAGES // SENDERS)) for number in range(SENDERS)}
