"""Retries end, wait as long as was asked for, and never on values that make no sense."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom_django.errors import DefinitionError, InvalidInputError, shown
from loom_django.kernel.backoff import RetryPolicy, delay, redrive_delay, retries
from loom_django.kernel.durations import seconds

pytestmark = pytest.mark.once

draws = st.floats(0, 1, exclude_max=True)


# Durations.


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (0, 0.0),
        (30, 30.0),
        (0.25, 0.25),
        (timedelta(hours=1, milliseconds=500), 3600.5),
        (timedelta(days=365_250), 31_557_600_000.0),
    ],
)
def test_a_duration_is_seconds_or_a_timedelta(duration, expected):
    """Both spellings of a duration give seconds."""
    length = seconds(duration, "timeout")
    assert (length, type(length)) == (expected, float)


# One row for each kind of nonsense.
@pytest.mark.parametrize(
    "duration",
    [
        -1,
        -0.001,
        timedelta(microseconds=-1),
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        timedelta(days=365_250, seconds=1),
        10**9000,
        True,
        False,
        "30",
        None,
        Decimal(3),
        [1],
    ],
    ids=shown,
)
def test_what_is_no_duration_is_refused(duration):
    """The refusal names the argument and its value."""
    with pytest.raises(InvalidInputError, match=r"timeout=.*duration"):
        seconds(duration, "timeout")


# The policy.


def test_the_defaults_retry_twice_after_growing_delays():
    """Without arguments a policy has the values that the reference promises."""
    policy = RetryPolicy()
    assert dataclasses.asdict(policy) == {
        "max_attempts": 3,
        "initial_interval": 1.0,
        "backoff": 2.0,
        "max_interval": 3600.0,
        "jitter": True,
        "retry_on": (Exception,),
        "non_retryable": (),
        "fresh_key": False,
    }
    assert [retries(policy, OSError(), failures) for failures in (1, 2, 3, 4)] == [True, True, False, False]


def test_a_policy_is_a_value():
    """Policies of equal arguments are equal, cannot be changed, and can be varied."""
    policy = RetryPolicy(initial_interval=timedelta(seconds=2), retry_on=OSError)
    assert policy == RetryPolicy(initial_interval=2, retry_on=(OSError,))
    assert hash(policy) == hash(RetryPolicy(initial_interval=2.0, retry_on=OSError))
    assert dataclasses.replace(policy, max_attempts=9).initial_interval == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.max_attempts = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        RetryPolicy(5)  # type: ignore[call-arg]


# One row for each rule, at its edge.
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_attempts": 0}, "max_attempts=0.*1 or more"),
        ({"max_attempts": True}, "max_attempts=True.*an int"),
        ({"max_attempts": 2.0}, "max_attempts=2.0.*an int"),
        ({"max_attempts": "3"}, "max_attempts='3'.*an int"),
        ({"backoff": 0.5}, "backoff=0.5.*1 or more"),
        ({"backoff": math.nan}, "backoff=nan"),
        ({"backoff": math.inf}, "backoff=inf"),
        ({"backoff": True}, "backoff=True"),
        ({"backoff": "2"}, "backoff='2'"),
        ({"initial_interval": -1}, "initial_interval=-1"),
        ({"initial_interval": "1"}, "initial_interval='1'"),
        ({"max_interval": math.nan}, "max_interval=nan"),
        ({"initial_interval": 7200}, "initial_interval=7200.*at most max_interval"),
        ({"jitter": 1}, "jitter=1.*True or False"),
        ({"fresh_key": None}, "fresh_key=None.*True or False"),
        ({"retry_on": "OSError"}, "retry_on='OSError'.*exception class"),
        ({"retry_on": (OSError, 3)}, "retry_on=.*exception class"),
        ({"retry_on": [OSError]}, "retry_on=.*exception class"),
        ({"retry_on": OSError("x")}, "retry_on=.*exception class"),
        ({"non_retryable": int}, "non_retryable=.*exception class"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(arguments, message):
    """A wrong value is refused where the policy is written, with its name and rule."""
    with pytest.raises(DefinitionError, match=message):
        RetryPolicy(**arguments)


# The classes of an error decide; what must not be retried wins.
@pytest.mark.parametrize(
    ("policy", "error", "expected"),
    [
        (RetryPolicy(), ValueError(), True),
        (RetryPolicy(), KeyboardInterrupt(), False),
        (RetryPolicy(retry_on=OSError), TimeoutError(), True),
        (RetryPolicy(retry_on=OSError), ValueError(), False),
        (RetryPolicy(retry_on=()), ValueError(), False),
        (RetryPolicy(non_retryable=LookupError), KeyError(), False),
        (RetryPolicy(retry_on=KeyError, non_retryable=(ValueError, LookupError)), KeyError(), False),
        (RetryPolicy(max_attempts=1), ValueError(), False),
    ],
)
def test_the_class_of_an_error_decides_on_a_retry(policy, error, expected):
    """Subclasses count, and non_retryable wins over retry_on."""
    assert retries(policy, error, 1) is expected


def test_the_last_attempt_is_the_one_of_that_number():
    """With max_attempts=n the n-th failure is final."""
    policy = RetryPolicy(max_attempts=5)
    assert [retries(policy, OSError(), failures) for failures in range(1, 7)] == [True] * 4 + [False] * 2


# Delays.


def test_delays_grow_to_their_limit():
    """Without jitter the delay is the interval itself."""
    policy = RetryPolicy(initial_interval=2, backoff=3, max_interval=50, jitter=False)
    assert [delay(policy, failures, 0.5) for failures in (1, 2, 3, 4, 5)] == [2, 6, 18, 50, 50]


def test_jitter_spreads_over_the_whole_interval():
    """The draw chooses a place between nothing and the interval."""
    policy = RetryPolicy(initial_interval=2, backoff=3, max_interval=50)
    assert [delay(policy, 2, draw) for draw in (0.0, 0.5, 0.999)] == [0.0, 3.0, pytest.approx(5.994)]


@given(st.integers(1, 10**6), draws, st.floats(1, 1e300), st.floats(0, 3600))
def test_no_delay_leaves_its_bounds(failures, draw, backoff, first):
    """However often it failed, the delay is a number between nothing and the limit."""
    policy = RetryPolicy(initial_interval=first, backoff=backoff)
    assert 0 <= delay(policy, failures, draw) <= 3600


def test_contended_wakes_back_off_from_200_ms_to_30_s():
    """The tries of a contended wake double from 200 ms and stay at 30 s."""
    whole = [redrive_delay(attempt, 0.5) * 2 for attempt in range(1, 11)]
    assert whole == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])
    assert redrive_delay(1, 0.0) == 0


@given(st.integers(1, 10**6), draws)
def test_no_redrive_leaves_its_bounds(attempt, draw):
    """A wake that was contended a million times still comes back within 30 s."""
    assert 0 <= redrive_delay(attempt, draw) < 30
