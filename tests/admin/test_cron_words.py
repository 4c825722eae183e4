"""A cron expression as a sentence says what the expression says, and no more."""

from __future__ import annotations

import pytest

from loom_django.admin.cron_words import in_words
from loom_django.kernel import cron

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("30 3 * * *", "At 03:30, every day"),
        ("* * * * *", "Every minute, every day"),
        ("*/15 * * * *", "Every 15 minutes, every day"),
        ("0 * * * *", "Every hour on the hour, every day"),
        ("5 * * * *", "At minute 5 of each hour, every day"),
        ("5,20,40 * * * *", "At minutes 5, 20 and 40 of each hour, every day"),
        # Sixty is no multiple of seven, so it is not every seven minutes.
        ("*/25 * * * *", "At minutes 0, 25 and 50 of each hour, every day"),
        ("5-10,30 * * * *", "At minutes 5 to 10 and 30 of each hour, every day"),
        ("15 7,8,13,19 * * *", "At 07:15, 08:15, 13:15 and 19:15, every day"),
        ("*/10 9-17 * * MON-FRI", "Every 10 minutes, from 09:00 to 17:59, on Monday to Friday"),
        ("0 */3 * * *", "Every hour on the hour, in the hours 00, 03, 06, 09, 12, 15, 18 and 21, every day"),
        ("0 0 1 * *", "At 00:00, on day 1 of each month"),
        ("0 0 1,15 * *", "At 00:00, on days 1 and 15 of each month"),
        ("0 0 29 2 *", "At 00:00, on day 29 in February"),
        ("0 0 13 * FRI", "At 00:00, on day 13 of the month and on every Friday"),
        ("0 0 */10 * 1-5", "At 00:00, on days 1, 11, 21 and 31 of the month if that is a Monday to Friday"),
        ("0 0 * * FRI-SUN", "At 00:00, on Friday to Sunday"),
        ("0 0 * * 0,6", "At 00:00, on Saturday and Sunday"),
        ("0 12 * JAN,jul MON", "At 12:00, on Monday in January and July"),
        ("0 12 * 6-8 *", "At 12:00, every day in June to August"),
    ],
)
def test_an_expression_as_a_sentence(expression, words):
    """Times by the clock, days by name, spans as spans."""
    assert in_words(cron.parse(expression)) == words


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0 0 13 * FRI", "0 0 13 * *"),
        ("0 0 */10 * 1-5", "0 0 1,11,21,31 * 1-5"),
        ("*/30 * * * *", "0,31 * * * *"),
        ("0 9-17 * * *", "0 9,17 * * *"),
        ("0 0 1 1 *", "0 0 1 * *"),
    ],
)
def test_what_differs_is_told_apart(one, other):
    """Two expressions of different times are never one sentence."""
    assert in_words(cron.parse(one)) != in_words(cron.parse(other))
