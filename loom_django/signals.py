"""Past-tense facts for receivers: sent after the commit, robustly, and not durably.

The sender is the registered :class:`~loom_django.Flow`, or the class ``Execution`` for a flow that is unknown
here. All carry ``execution_id``, ``flow_id``, ``version`` and ``sequence``. Work that must happen belongs in a
step: a process that dies between the commit and the signal sends none.
"""

from __future__ import annotations

from django.dispatch import Signal

execution_started = Signal()  # subject
execution_suspended = Signal()  # waits, reason
execution_resumed = Signal()  # event_type, principal
execution_completed = Signal()  # result
execution_failed = Signal()  # error_type, message
execution_cancelled = Signal()  # reason, principal
effect_in_doubt = Signal()  # step_id, idempotency_key, cause
verdict_given = Signal()  # step_id, resolution, principal, reason
execution_recovered = Signal()  # previous_owner; sequence is the newest of the log
# expected: ids of the recorded steps that were skipped; seen: what came instead; sequence is the newest of the log
flow_diverged = Signal()
redrive_exhausted = Signal()  # attempts; sequence is the newest of the log
schedule_skipped = Signal()  # schedule_id, occurrence, why; the execution was not made, its sequence is None
