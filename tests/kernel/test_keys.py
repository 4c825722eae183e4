"""What is not an id is refused, and keys made from different parts never meet."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom_django.errors import InvalidIdError
from loom_django.kernel import keys

pytestmark = pytest.mark.once


class Name(str, Enum):  # noqa: UP042 - the form that Django's TextChoices has
    A = "a"

    def __str__(self) -> str:
        return "another text"


# Checks.


@pytest.mark.parametrize("value", ["a", "x" * 255, "order-17/ship#2", "Größe 😀", "a b", "~", "%", ":r"])
def test_ids_are_printable_text(value):
    """Anything that can be shown on one line is an id."""
    assert keys.check_id(value, "id") == value


# One row for each way to be no id.
@pytest.mark.parametrize(
    "value",
    [
        "",
        "x" * 256,
        "a\nb",
        "a\0",
        "\ud800",
        "a\u200b",
        "\u202e",
        "a\tb",
        "\u00a0",
        5,
        None,
        b"a",
        UUID(int=1),
    ],
    ids=ascii,
)
def test_what_is_no_id_is_refused(value):
    """The refusal names what the id was for and the rule."""
    with pytest.raises(InvalidIdError, match=r"message id .* must be text of 1 to 255 printable characters"):
        keys.check_id(value, "message id")


def test_a_subclass_of_str_gives_its_plain_text():
    """An id never carries a class that another process does not know."""
    checked = keys.check_id(Name.A, "id")
    assert (checked, type(checked)) == ("a", str)


@pytest.mark.parametrize("value", ["a~2", "~0", "a~b~17"])
def test_names_of_continued_executions_are_reserved(value):
    """A user's execution cannot take the name of a successor."""
    with pytest.raises(InvalidIdError, match='must not end in "~"'):
        keys.check_execution_id(value)


@pytest.mark.parametrize("value", ["a~", "a~2b", "~2~x", "a~²", "a~٢", "order-17"])
def test_other_uses_of_the_tilde_are_free(value):
    """Only the ending is reserved."""
    assert keys.check_execution_id(value) == value


@pytest.mark.parametrize("value", ["a:r1", ":r0", "a#b:r12"])
def test_endings_of_fresh_keys_are_reserved(value):
    """A step cannot be named like the fresh key of another."""
    with pytest.raises(InvalidIdError, match='must not end in ":r"'):
        keys.check_step_id(value)
    with pytest.raises(InvalidIdError):
        keys.check_step_name(value)


@pytest.mark.parametrize("value", ["a:r", "a:r1x", "a:b", "ar1", "charge"])
def test_other_uses_of_the_colon_are_free(value):
    """Only the ending is reserved."""
    assert keys.check_step_name(value) == value


def test_a_declared_step_has_no_number_sign():
    """Ids with "#" are made from keys and repetitions only."""
    assert keys.check_step_id("ship#2") == "ship#2"
    with pytest.raises(InvalidIdError, match='must not contain "#"'):
        keys.check_step_name("ship#2")


@pytest.mark.parametrize("check", [keys.check_execution_id, keys.check_step_id, keys.check_step_name])
def test_every_check_asks_for_an_id_first(check):
    """The rule of all ids stands for each kind."""
    with pytest.raises(InvalidIdError, match="1 to 255 printable"):
        check("")


@pytest.mark.parametrize(
    ("key", "suffix"),
    [
        ("sku-1", "sku-1"),
        ("a#b", "a#b"),
        (Name.A, "a"),
        (5, "5"),
        (-(10**200), "-1" + "0" * 200),
        (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (date(2026, 3, 1), "2026-03-01"),
    ],
)
def test_keys_of_steps_are_text_numbers_uuids_and_dates(key, suffix):
    """Each kind of key has one spelling."""
    found = keys.key_suffix(key)
    assert (found, type(found)) == (suffix, str)


# A number too long to be written, and whatever has no single spelling or no lasting one.
@pytest.mark.parametrize(
    "key",
    [
        True,
        1.5,
        None,
        b"a",
        ("a", 1),
        datetime(2026, 3, 1, tzinfo=UTC),
        object(),
        "",
        "a\nb",
        "a:r1",
        10**300,
        10**9000,
    ],
    ids=lambda key: type(key).__name__,
)
def test_other_keys_are_refused(key):
    """A key must be printable and of a kind that reads the same tomorrow."""
    with pytest.raises(InvalidIdError, match="step key"):
        keys.key_suffix(key)


# Keys of effects.


# The forms that the outside world sees: no row may ever change, or a retry would pay twice.
@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (("order-17", "charge", 0), "order-17:charge"),
        (("order-17", "charge", 1), "order-17:charge:r1"),
        (("order-17", "charge", 12), "order-17:charge:r12"),
        (("a:b", "c", 0), "a%3Ab:c"),
        (("a", "b:c", 0), "a:b:c"),
        (("a%3Ab", "c", 0), "a%253Ab:c"),
        (("order-17~2", "ship#a/1", 0), "order-17~2:ship#a/1"),
        (("e" * 127, "s" * 127, 0), "e" * 127 + ":" + "s" * 127),
        (
            ("e" * 200, "s" * 100, 0),
            "e" * 189 + "%~0a439ba6ece938e0ff6e982ede5fe6127457093a7ebe68cd81b4e8a78b751572",
        ),
    ],
)
def test_the_key_of_an_effect_stays_as_it_is(parts, key):
    """An effect keeps its key over retries, crashes and releases."""
    assert keys.idempotency_key(*parts) == key


def test_a_long_key_is_shortened_and_readable():
    """A key has at most 255 characters, begins readably, and a fresh one ends in its generation."""
    plain, fresh = (keys.idempotency_key("order-" + "x" * 240, "charge", n) for n in (0, 3))
    assert len(plain) <= 255
    assert len(fresh) <= 255
    assert plain.startswith("order-xxx")
    assert fresh.endswith(":r3")
    assert len({plain, fresh}) == 2


def test_a_step_that_would_take_another_key_is_refused():
    """Whatever made the step's id, the key is not given out."""
    with pytest.raises(InvalidIdError):
        keys.idempotency_key("e", "charge:r1", 0)


def is_step(text: str) -> bool:
    try:
        keys.check_step_id(text)
    except InvalidIdError:
        return False
    return True


# Few letters, so that parts often spell the same text between them; long ones, so that many are shortened.
letters = st.text(st.sampled_from("a:%~r#1235AF"), min_size=1, max_size=8)
long_letters = letters.map(lambda text: (text * 255)[:255]) | letters.map(lambda text: text + "x" * 240)
ids = letters | long_letters
parts = st.tuples(ids, ids.filter(is_step), st.integers(0, 12))


@given(st.lists(parts, max_size=40, unique=True))
def test_different_effects_have_different_keys(effects):
    """No two of (execution, step, generation) meet in one key, and none is too long."""
    made = [keys.idempotency_key(*effect) for effect in effects]
    assert len(set(made)) == len(made)
    assert max(map(len, made), default=0) <= 255


def test_short_parts_never_meet():
    """The same over every short combination of the characters that keys are made with."""
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product("a:%r1~", repeat=size)]
    steps = [word for word in words if is_step(word)]
    made = {keys.idempotency_key(e, s, g) for e in words for s in steps for g in (0, 1)}
    assert len(made) == len(words) * len(steps) * 2


def test_a_shortened_key_is_nobody_elses():
    """An execution named like a shortened key does not get that key."""
    for shortened in keys.idempotency_key("e" * 300, "s", 0), keys.idempotency_key("e", "s" * 255, 0):
        assert ":" not in shortened  # which every other key has
    fresh = keys.idempotency_key("e" * 300, "s", 1)
    head, _, step = fresh.partition(":")
    assert step == "r1"
    assert keys.idempotency_key(head, step, 0) != fresh


# Ids of children and occurrences.


def test_children_are_numbered_under_their_parent():
    """A child's id tells parent, flow and number."""
    assert keys.child_id("order-17", "ship", 2) == "order-17/ship#2"
    assert keys.child_id("order-17/ship#2", "label", 1) == "order-17/ship#2/label#1"


def test_children_of_different_parents_never_meet():
    """A slash in the name of a flow does not make it another parent's."""
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product("a/#%1", repeat=size)]
    made = {keys.child_id(parent, flow, n) for parent in words for flow in words for n in (1, 11)}
    assert len(made) == len(words) ** 2 * 2
    assert keys.child_id("p", "a/b", 1) != keys.child_id("p", "a%2Fb", 1)


def test_occurrences_are_named_by_their_instant():
    """Every node names the execution of one occurrence alike."""
    assert keys.occurrence_id("nightly", 1792886400000) == "nightly@1792886400000"


@pytest.mark.parametrize(
    "make", [lambda long, n: keys.child_id(long, "ship", n), lambda long, n: keys.occurrence_id(long, n)]
)
def test_long_ids_are_shortened(make: Any):
    """An id made from a long one is an id, differs by its number, and begins readably."""
    made = [make("x" * 250 + end, n) for end in ("a", "b") for n in (1001, 1002)]
    assert len(set(made)) == 4
    for found in made:
        assert keys.check_execution_id(found).startswith("xxxx")
