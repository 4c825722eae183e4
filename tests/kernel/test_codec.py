"""Values come back from the log equal and of the same type; what cannot is refused with path and advice."""

from __future__ import annotations

import functools
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, localcontext
from enum import Enum, Flag, IntEnum, IntFlag, auto
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.core.files.base import ContentFile
from django.db.models import TextChoices
from django.http import HttpRequest, QueryDict
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from loom_django.errors import (
    DefinitionError,
    PayloadTooLargeError,
    UnencodableValueError,
    UnreadableValueError,
)
from loom_django.kernel import codec
from loom_django.kernel.codec import canonical, decode, dumps, encode, loads, register_type
from loom_django.kernel.events import parse

pytestmark = pytest.mark.once


@register_type(name="tests.Money")
@dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str = "EUR"


@register_type(name="tests.Node")
@dataclass
class Node:
    lines: Any
    seen: int = field(default=0, init=False)


@register_type(name="tests.Incomplete")
@dataclass
class Incomplete:
    late: int = field(init=False)


@register_type(name="tests.Colour")
class Colour(Enum):
    RED = "r"
    CRIMSON = "r"  # an alias of RED
    BLUE = object()  # a value that could not be recorded itself


@register_type(name="tests.Rank")
class Rank(IntEnum):
    LOW = 1
    HIGH = 2


@register_type(name="tests.Access")
class Access(Flag):
    READ = auto()
    WRITE = auto()


@register_type(name="tests.Wide")
class Wide(IntFlag):
    TOP = 2**70


class Unregistered(IntEnum):
    ONE = 1


class Status(TextChoices):
    PAID = "paid", "Paid"


@dataclass
class Loose:
    x: int = 0


Pair = namedtuple("Pair", "a b")


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Real(float):
    pass


class Day(date):
    pass


class Moment(datetime):
    pass


class HomeMade(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(hours=1)

    def dst(self, when: datetime | None) -> None:
        return None

    def tzname(self, when: datetime | None) -> str:
        return "home"


def keyless_zone() -> ZoneInfo:
    """A zone that was read from a file, as small as the format allows."""
    header = b"TZif" + bytes(16) + struct.pack(">6L", 0, 0, 0, 0, 1, 4)
    return ZoneInfo.from_file(io.BytesIO(header + struct.pack(">lBB", 0, 0, 0) + b"UTC\0"))


# Equality that sees what == does not: types, NaN, the sign of zero, zones, folds and the order of keys.


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))
    if isinstance(one, dict):
        return same(
            [pair for item in one.items() for pair in item], [pair for item in two.items() for pair in item]
        )
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, set | frozenset):
        return same(sorted(one, key=dumps), sorted(two, key=dumps))
    if isinstance(one, float | Decimal):
        return repr(one) == repr(two)
    if isinstance(one, datetime | time):
        return (repr(one), one.fold, one.tzname()) == (repr(two), two.fold, two.tzname())
    return bool(one == two)


def strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, list):
        for item in tree:
            yield from strings(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield key
            yield from strings(item)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def assert_any_reader_takes(text: str) -> None:
    assert text.isascii()
    for found in strings(json.loads(text, parse_constant=refuse_constant)):
        assert "\0" not in found
        found.encode()  # fails on a lone surrogate


texts = st.text(st.characters(exclude_categories=()))
zones = st.one_of(
    st.none(),
    st.just(UTC),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Asia/Kolkata", "UTC"]).map(ZoneInfo),
    st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23))),
    st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), texts),
)
folds = st.integers(0, 1)
hashables = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=-(2**200), max_value=2**200),
        st.floats(),
        texts,
        st.binary(),
        st.builds(
            lambda when, zone, fold: when.replace(tzinfo=zone, fold=fold), st.datetimes(), zones, folds
        ),
        st.builds(lambda when, zone, fold: when.replace(tzinfo=zone, fold=fold), st.times(), zones, folds),
        st.dates(),
        st.timedeltas(),
        st.decimals().filter(lambda number: not number.is_snan()),  # a signalling NaN has no hash
        st.uuids(),
        st.sampled_from([*Colour, *Rank, *Wide]),
        st.sampled_from([Access(0), Access.READ, Access.READ | Access.WRITE]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple),
        st.frozensets(inner, max_size=4),
        st.builds(Money, inner, texts),
    ),
    max_leaves=8,
)
dollar_keys = st.sampled_from(["$", "$int", "$map", "$data", "$$", "$nothing"])
values = st.recursive(
    hashables | st.just(Decimal("sNaN12")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(hashables, max_size=4),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(dollar_keys, inner, max_size=2),
        st.builds(Node, inner),
    ),
    max_leaves=20,
)


@given(values)
def test_values_come_back_as_they_were(value):
    """Both ways of reading give an equal value of the same type, and no reader of JSON chokes on the text."""
    text = dumps(value)
    assert_any_reader_takes(text)
    assert same(loads(text), value)
    assert same(decode(encode(value)), value)
    assert json.loads(text) == encode(value)


@given(values)
def test_every_parser_reads_the_same_from_a_stored_text(value):
    """A log is parsed by orjson where that is installed, and nothing in it may be another value then."""
    text = dumps([value, 2**63 - 1, -(2**63), 5e-324, 0.1])
    assert repr(parse(text)) == repr(json.loads(text))


@given(values)
def test_writing_a_value_again_gives_the_same_text(value):
    """What came back from the log is written as it was, so nothing drifts over replays."""
    assert dumps(loads(dumps(value))) == dumps(value)


# The stored form is read by later releases: no row of this table may ever change.
STORED = [
    (None, "null"),
    (True, "true"),
    (1, "1"),
    (1.0, "1.0"),
    (0.0, "0.0"),
    (1e300, "1e+300"),
    ("a", '"a"'),
    ("ü😀", r'"\u00fc\ud83d\ude00"'),
    ([1, [2]], "[1,[2]]"),
    ({"b": 1, "a": {}}, '{"b":1,"a":{}}'),
    ({"$a": 1, "$b": 2}, '{"$a":1,"$b":2}'),
    (2**63 - 1, "9223372036854775807"),
    (-(2**63), "-9223372036854775808"),
    (2**63, '{"$int":"8000000000000000"}'),
    (-(2**63) - 1, '{"$int":"-8000000000000001"}'),
    (9007199254740993, "9007199254740993"),  # above what a float holds
    (float("nan"), '{"$float":"nan"}'),
    (float("inf"), '{"$float":"inf"}'),
    (float("-inf"), '{"$float":"-inf"}'),
    (-0.0, '{"$float":"-0.0"}'),
    ("a\0b", '{"$str":"YQBi"}'),
    ("\ud800", '{"$str":"7aCA"}'),
    ("\ud83d\ude00", '{"$str":"7aC97biA"}'),  # two surrogates, which a reader would join to one character
    (b"\0\xff", '{"$bytes":"AP8="}'),
    ((1, "a"), '{"$tuple":[1,"a"]}'),
    ({"b", "a", "c"}, '{"$set":["a","b","c"]}'),
    (frozenset({2, 10}), '{"$frozenset":[10,2]}'),
    ({1: "a", "b": 2}, '{"$map":[[1,"a"],["b",2]]}'),
    ({"\0": 1}, '{"$map":[[{"$str":"AA=="},1]]}'),
    ({"$int": "f"}, '{"$map":[["$int","f"]]}'),
    (datetime(2026, 3, 1, 2, 14), '{"$datetime":"2026-03-01T02:14:00"}'),
    (datetime(2026, 3, 1, 2, 14, 0, 7, UTC), '{"$datetime":"2026-03-01T02:14:00.000007+00:00"}'),
    (datetime(2026, 3, 1, fold=1), '{"$datetime":["2026-03-01T00:00:00",1]}'),
    (
        datetime(2026, 3, 1, fold=1, tzinfo=UTC),
        '{"$datetime":["2026-03-01T00:00:00",1,{"$timedelta":[0,0,0]}]}',
    ),
    (
        datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        '{"$datetime":["2026-10-25T02:30:00",1,"Europe/Berlin"]}',
    ),
    (
        datetime(2026, 3, 1, tzinfo=timezone(timedelta(hours=1), "CET")),
        '{"$datetime":["2026-03-01T00:00:00",0,{"$timedelta":[0,3600,0]},"CET"]}',
    ),
    (
        time(1, tzinfo=timezone(timedelta(0), "\0")),
        '{"$time":["01:00:00",0,{"$timedelta":[0,0,0]},{"$str":"AA=="}]}',
    ),
    # Python 3.11 reads an offset below one second as none, so offsets do not go as text.
    (
        datetime(2026, 3, 1, tzinfo=timezone(timedelta(microseconds=1))),
        '{"$datetime":["2026-03-01T00:00:00",0,{"$timedelta":[0,0,1]}]}',
    ),
    (date(2026, 3, 1), '{"$date":"2026-03-01"}'),
    (time(2, 14, tzinfo=ZoneInfo("UTC")), '{"$time":["02:14:00",0,"UTC"]}'),
    (timedelta(days=-1, microseconds=1), '{"$timedelta":[-1,0,1]}'),
    (Decimal("9.90"), '{"$decimal":"9.90"}'),
    (Decimal("-0E+3"), '{"$decimal":"-0E+3"}'),
    (Decimal("sNaN7"), '{"$decimal":"sNaN7"}'),
    (Decimal("-Infinity"), '{"$decimal":"-Infinity"}'),
    (UUID(int=5), '{"$uuid":"00000000-0000-0000-0000-000000000005"}'),
    (Colour.CRIMSON, '{"$enum":["tests.Colour","RED"]}'),
    (Rank.HIGH, '{"$enum":["tests.Rank","HIGH"]}'),
    (Access.READ | Access.WRITE, '{"$enum":["tests.Access",3]}'),
    (Wide.TOP, '{"$enum":["tests.Wide",{"$int":"400000000000000000"}]}'),
    (Money(Decimal(5)), '{"$data":["tests.Money",{"amount":{"$decimal":"5"},"currency":"EUR"}]}'),
]


@pytest.mark.parametrize(("value", "text"), STORED, ids=[text for _, text in STORED])
def test_the_stored_form_stays_as_it_is(value, text):
    """A value is written as it always was, and what was written is read."""
    assert dumps(value) == text
    assert same(loads(text), value)


def test_the_order_of_keys_is_kept():
    """A dict comes back in the order in which it was written, at every level."""
    value = {"z": {"b": 1, "a": 2}, "a": 0, 3: {2: 0, 1: 0}}
    assert list(loads(dumps(value))) == ["z", "a", 3]
    assert list(loads(dumps(value))["z"]) == ["b", "a"]
    assert list(loads(dumps(value))[3]) == [2, 1]


def test_very_long_integers_come_back():
    """Python's limit on the digits of an integer does not stand between a flow and its number."""
    number = 10**5000 + 1
    assert loads(dumps({"n": number, number: [-number]})) == {"n": number, number: [-number]}


@pytest.mark.parametrize("capitals", [0, 1])
def test_a_decimal_context_does_not_change_the_text(capitals):
    """Code that sets a decimal context of its own writes the same text as all others."""
    with localcontext() as context:
        context.capitals = capitals
        context.prec = 2
        assert dumps(Decimal("1.23456E+50")) == '{"$decimal":"1.23456E+50"}'


def test_nothing_is_shared_with_the_value():
    """A tree and a value that was read are copies: changing one changes no other."""
    value: dict[str, Any] = {"a": [1]}
    tree = encode(value)
    again = decode(tree)
    value["a"].append(2)
    tree["a"].append(3)
    assert again == {"a": [1]}
    assert tree == {"a": [1, 3]}


# Refusals.

TOOL = "in a tool"
REFUSED: list[tuple[str, Callable[[], Any], str, str]] = [
    # what, how to make it, the type as the message names it, a part of the advice
    ("generator", lambda: (n for n in [1]), "generator", "list(value)"),
    ("iterator", lambda: iter([1]), "list_iterator", "list(value)"),
    ("map", lambda: map(str, [1]), "map", "list(value)"),
    ("range", lambda: range(3), "range", "list(value)"),
    ("dict view", lambda: {}.keys(), "dict_keys", "list(value)"),
    ("deque", lambda: deque([1]), "collections.deque", "list(value)"),
    ("function", lambda: keyless_zone, "function", "name"),
    ("lambda", lambda: lambda: None, "function", "name"),
    ("built-in", lambda: len, "builtin_function_or_method", "name"),
    ("partial", lambda: functools.partial(len, []), "functools.partial", "name"),
    ("class", lambda: Money, "type", "name"),
    ("module", lambda: json, "module", "name"),
    ("exception", lambda: ValueError("x"), "ValueError", "str(error)"),
    ("open file", tempfile.TemporaryFile, "_io.BufferedRandom", "Store the file"),
    ("memory file", lambda: io.StringIO("x"), "_io.StringIO", "Store the file"),
    ("named file", tempfile.NamedTemporaryFile, "tempfile._TemporaryFileWrapper", "Store the file"),
    ("Django file", lambda: ContentFile(b"x"), "django.core.files.base.ContentFile", "Store the file"),
    ("request", HttpRequest, "django.http.request.HttpRequest", "from the request"),
    ("QueryDict", lambda: QueryDict("a=1"), "django.http.request.QueryDict", "value.dict()"),
    ("lazy text", lambda: gettext_lazy("Save"), "django.utils.functional.", "str(value)"),
    ("lazy object", lambda: SimpleLazyObject(lambda: 1 / 0), "SimpleLazyObject", "pk"),
    ("safe text", lambda: mark_safe("x"), "django.utils.safestring.SafeString", 'str: value + ""'),
    ("str subclass", lambda: Text("x"), "Text", "plain str"),
    ("int subclass", lambda: Whole(1), "Whole", "plain int"),
    ("float subclass", lambda: Real(1), "Real", "plain float"),
    ("namedtuple", lambda: Pair(1, 2), "Pair", "plain tuple"),
    ("OrderedDict", OrderedDict, "collections.OrderedDict", "plain dict"),
    ("defaultdict", lambda: defaultdict(list), "collections.defaultdict", "plain dict"),
    ("Counter", lambda: Counter("a"), "collections.Counter", "plain dict"),
    ("date subclass", lambda: Day(2026, 1, 1), "Day", "plain datetime.date"),
    ("datetime subclass", lambda: Moment(2026, 1, 1), "Moment", "plain datetime.datetime"),
    ("Enum", lambda: Unregistered.ONE, "Unregistered", ".value"),
    ("TextChoices", lambda: Status.PAID, "Status", ".value"),
    ("dataclass", Loose, "Loose", "register_type"),
    ("bytearray", lambda: bytearray(b"x"), "bytearray", "bytes(value)"),
    ("memoryview", lambda: memoryview(b"x"), "memoryview", "bytes(value)"),
    ("complex", lambda: 1j, "complex", "value.imag"),
    ("Fraction", lambda: Fraction(1, 3), "fractions.Fraction", "str(value)"),
    ("Path", lambda: Path("x"), "Path", "str(value)"),
    ("object", object, "object", "plain data"),
    ("own tzinfo", lambda: datetime(2026, 1, 1, tzinfo=HomeMade()), "datetime.datetime", "zoneinfo"),
    ("own tzinfo, time", lambda: time(1, tzinfo=HomeMade()), "datetime.time", "zoneinfo"),
    ("zone without key", lambda: datetime(2026, 1, 1, tzinfo=keyless_zone()), "datetime.datetime", "key"),
]


@pytest.mark.parametrize(
    ("make", "name", "advice"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_cannot_be_recorded_is_refused(make, name, advice):
    """The refusal names the place in the value, the type found there and what to pass instead."""
    value = make()
    with pytest.raises(UnencodableValueError) as refused:
        dumps([1, {"lines": Node([0, ("a", value)])}], path="args")
    if hasattr(type(value), "close"):  # asked of the type, because a lazy object would come to life
        value.close()
    assert refused.value.path == 'args[1]["lines"].lines[1][1]'
    assert name in refused.value.type_name
    assert advice in refused.value.instead
    assert all(part in str(refused.value) for part in (refused.value.path, name, advice))


def test_model_instances_and_querysets_are_refused():
    """A row is passed by its key; refusing it asks the database nothing."""
    from django.contrib.auth.models import User

    with pytest.raises(
        UnencodableValueError, match=r"args\[0\] is a django.contrib.auth.models.User.*pk.*tool"
    ):
        encode([User(pk=1)], path="args")
    with pytest.raises(UnencodableValueError, match=r'kwargs\["of"\] is a .*QuerySet.*values_list'):
        encode({"of": User.objects.all()}, path="kwargs")
    with pytest.raises(UnencodableValueError, match="UserManager"):
        encode(User.objects)


# What the advice says for each row is itself accepted, and says the same.
@pytest.mark.parametrize(
    ("advised", "plain"),
    [
        (lambda: mark_safe("x") + "", "x"),
        (lambda: Status.PAID.value, "paid"),
        (lambda: Unregistered.ONE.value, 1),
        (lambda: int(Whole(3)), 3),
        (lambda: float(Real(3)), 3.0),
        (lambda: tuple(Pair(1, 2)), (1, 2)),
        (lambda: dict(OrderedDict(a=1)), {"a": 1}),
        (lambda: QueryDict("a=1&a=2").dict(), {"a": "2"}),
        (lambda: dict(QueryDict("a=1&a=2").lists()), {"a": ["1", "2"]}),
        (lambda: str(gettext_lazy("x")), "x"),
        (lambda: bytes(bytearray(b"x")), b"x"),
    ],
)
def test_following_the_advice_works(advised, plain):
    """A reader who does what the message says is not sent round in a circle."""
    assert same(loads(dumps(advised())), plain)


# One row for each place that something can stand in.
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (1j, "value"),
        ([0, 1j], "value[1]"),
        ((1j,), "value[0]"),
        ({"sku": 1j}, 'value["sku"]'),
        ({'a"b\n': 1j}, r'value["a\"b\n"]'),
        ({3: 1j}, "value[3]"),
        ({(1, "a"): 1j}, "value[(1, 'a')]"),
        ({1j: 3}, "value.keys()"),
        ({(0, 1j): 3}, "value.keys()[1]"),
        ({"a": [], 1j: []}, "value.keys()"),
        ({"x" * 100: 1j}, "value['" + "x" * 79 + "…]"),
        ({10**9000: 1j}, "value[a int]"),
        ({1j}, "value{…}"),
        (frozenset({(1j,)}), "value{…}[0]"),
        (Node({"a": [Money(1j)]}), 'value.lines["a"][0].amount'),  # type: ignore[arg-type]
        ([[], {}, (), set(), "ok", Colour.RED, 1j], "value[6]"),
    ],
)
def test_paths_lead_to_the_refused_place(value, path):
    """A path reads like the Python that reaches the place."""
    with pytest.raises(UnencodableValueError) as refused:
        encode(value)
    assert refused.value.path == path
    assert refused.value.type_name == "complex"


def test_keys_are_refused_like_values():
    """A key of a subclass of str would come back as another key."""
    with pytest.raises(UnencodableValueError, match=r"value\.keys\(\) is a .*SafeString") as refused:
        encode({mark_safe("sku"): 1})
    assert refused.value.path == "value.keys()"


def test_a_field_that_was_never_set_is_named():
    """A dataclass that is not complete is refused where it is handed in, not when it is read."""
    with pytest.raises(UnencodableValueError, match=r"value\[0\]\.late is a field without a value"):
        encode([Incomplete()])


def wrapped(wrap: Callable[[Any], Any], times: int) -> Any:
    value: Any = 1
    for _ in range(times):
        value = wrap(value)
    return value


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "map": lambda inner: {1: inner},
    "frozenset": lambda inner: frozenset({inner}),
    "dataclass": Node,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_nesting_is_allowed_to_200_levels(wrap):
    """A value 200 levels deep comes back, one more level is refused with the place named."""
    deep = wrapped(wrap, 200)
    assert dumps(loads(dumps(deep))) == dumps(decode(encode(deep))) == dumps(deep)
    assert canonical(deep) == dumps(deep)
    with pytest.raises(UnencodableValueError, match="deeper than 200 levels") as refused:
        encode(wrap(deep))
    assert len(refused.value.path) > 200


def test_a_value_too_deep_for_the_call_stack_is_refused():
    """Where little of the stack is left, a deep value is refused like any other."""

    def deep(frames: int) -> None:
        if frames:
            deep(frames - 1)
        else:
            dumps(wrapped(WRAPPERS["map"], 200), path="result")

    limit = sys.getrecursionlimit()
    with pytest.raises(UnencodableValueError, match=r"result is a dict.*nested too deeply"):
        deep(limit - stack_depth() - 150)


def stack_depth() -> int:
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


@pytest.mark.parametrize("key", ["list", "dict", "dataclass"])
def test_cycles_are_refused(key):
    """A value that contains itself is refused at the place where it does."""
    node = Node(None)
    value: Any = {"list": [0], "dict": {"a": 0}, "dataclass": node}[key]
    place = {"list": "[1]", "dict": '["self"]', "dataclass": ".lines"}[key]
    if key == "list":
        value.append(value)
    elif key == "dict":
        value["self"] = value
    else:
        node.lines = node
    with pytest.raises(UnencodableValueError, match="contains itself") as refused:
        encode([value])
    assert refused.value.path == "value[0]" + place


def test_a_part_that_stands_in_two_places_is_no_cycle():
    """The same list twice is two lists."""
    part = [1]
    assert loads(dumps([part, part, {"a": part}])) == [[1], [1], {"a": [1]}]


def test_a_text_above_the_limit_is_refused():
    """The refusal names what is too big and both sizes; exactly the limit is allowed."""
    assert dumps("ü" * 10, limit=62) == '"' + r"\u00fc" * 10 + '"'
    with pytest.raises(
        PayloadTooLargeError, match="result takes 62 bytes, more than the 61 allowed"
    ) as refused:
        dumps("ü" * 10, path="result", limit=61)
    assert (refused.value.size, refused.value.limit, refused.value.what) == (62, 61, "result")


# Reading what this process cannot make sense of.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"$future":1}', r'unknown tag "\$future".*newer release'),
        ('[{"$":1}]', "unknown tag"),
        (
            '{"$data":["os.system",{"command":"true"}]}',
            '^a recorded value is of type "os.system", which is not',
        ),
        ('{"$enum":["shop.Gone","A"]}', '^a recorded value is of type "shop.Gone", which is not registered'),
        ('{"$enum":["tests.Colour","GREEN"]}', "no member GREEN"),
        ('{"$data":["tests.Money",{"amount":1,"tax":2}]}', "no field tax"),
        ('{"$data":["tests.Money",{"currency":"EUR"}]}', "new field amount"),
        ('{"$datetime":"yesterday"}', r"\$datetime.*cannot be read"),
        ('{"$datetime":["2026-01-01T00:00:00",0,"Mars/Base"]}', "Mars/Base"),
        ('{"$time":["00:00:00",0,"../../etc/passwd"]}', r"\$time.*cannot be read"),
        ('{"$int":1}', r"\$int.*cannot be read"),
        ('{"$decimal":"x"}', r"\$decimal.*cannot be read"),
        ('{"$str":"?"}', r"\$str.*cannot be read"),
        ('{"$set":[[1]]}', r"\$set.*cannot be read"),
        ('{"$map":[1]}', r"\$map.*cannot be read"),
        ("{", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_what_cannot_be_read_is_told(text, message):
    """Reading fails with one error that names the tag or type, and calls nothing that was not registered."""
    with pytest.raises(UnreadableValueError, match=message):
        loads(text)


def test_an_older_record_takes_the_defaults_of_new_fields():
    """A field that was added with a default does not make old values unreadable."""
    assert loads('{"$data":["tests.Money",{"amount":1}]}') == Money(1)  # type: ignore[arg-type]


def test_what_was_recorded_wins_over_what_the_class_computes():
    """__post_init__ runs, so that derived attributes exist, and cannot change a recorded field."""

    @register_type(name="tests.Derived")
    @dataclass
    class Derived:
        count: int
        double: int = field(init=False)

        def __post_init__(self) -> None:
            self.count += 1
            self.double = self.count * 2
            self.cache = "made"

    value = Derived(1)
    again = loads(dumps(value))
    assert (again.count, again.double, again.cache) == (2, 4, "made")
    older = loads('{"$data":["tests.Derived",{"count":1}]}')  # from before the field "double"
    assert (older.count, older.double) == (1, 4)


def test_a_class_that_refuses_its_recorded_fields_is_told():
    """A check that was added to __post_init__ is named when an old value fails it."""

    @register_type(name="tests.Strict")
    @dataclass
    class Strict:
        count: int

        def __post_init__(self) -> None:
            if self.count < 0:
                raise ValueError("count is negative")

    with pytest.raises(UnreadableValueError, match="count is negative"):
        loads('{"$data":["tests.Strict",{"count":-1}]}')


def test_slots_and_keyword_only_fields_come_back():
    """The forms that a dataclass can take make no difference."""

    @register_type(name="tests.Compact")
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Compact:
        a: int
        b: InitVar[int] = 3

    assert same(loads(dumps(Compact(a=1))), Compact(a=1))


# Registering.


def test_a_taken_name_is_refused():
    """Two classes under one name would be read as each other."""
    with pytest.raises(DefinitionError, match=r"'tests.Money'.*taken by .*Money"):
        register_type(Loose, name="tests.Money")
    with pytest.raises(UnencodableValueError):
        encode(Loose())


def test_registering_again_is_quiet():
    """A module that is imported twice registers its classes twice."""
    assert register_type(Money, name="tests.Money") is Money
    assert register_type(Money) is Money
    assert [entry.name for entry in codec.registered_types()].count("tests.Money") == 1


def test_a_second_name_is_refused():
    """A class keeps the name that its recorded values carry."""
    with pytest.raises(DefinitionError, match=r"registered as 'tests\.Money' already"):
        register_type(Money, name="tests.Cash")


def test_names_default_to_the_place_of_the_class():
    """Without a name the class's place is stored, and checks can see that nobody chose it."""

    @register_type
    class Mood(Enum):
        GOOD = 1

    name = f"{__name__}.test_names_default_to_the_place_of_the_class.<locals>.Mood"
    entries = {entry.cls: entry for entry in codec.registered_types()}
    assert (entries[Mood].name, entries[Mood].explicit) == (name, False)
    assert entries[Money].explicit
    assert loads(dumps(Mood.GOOD)) is Mood.GOOD


@dataclass
class Wants:
    x: int
    extra: InitVar[int]


@dataclass
class Own:
    x: int

    def __init__(self, y: int) -> None:
        self.x = y


@dataclass
class Listed(list[int]):
    x: int


class Plain:
    pass


@pytest.mark.parametrize(
    ("cls", "name", "message"),
    [
        (Plain, None, "neither a dataclass nor an Enum"),
        (str, None, "neither a dataclass nor an Enum"),
        (Pair, None, "neither a dataclass nor an Enum"),
        ("shop.Money", None, "takes a class"),
        (Loose(), None, "takes a class"),
        (Wants, None, "extra"),
        (Own, None, "cannot be rebuilt.*'y'"),
        (Listed, None, "own content would not be recorded"),
        (Loose, "", "1 to 255 printable"),
        (Loose, "a\nb", "1 to 255 printable"),
        (Loose, "x" * 256, "1 to 255 printable"),
    ],
)
def test_what_cannot_be_registered_is_told(cls, name, message):
    """A class whose values could not be rebuilt is refused at the declaration."""
    with pytest.raises(DefinitionError, match=message):
        register_type(cls, name=name)


def test_recordable_goes_by_the_class():
    """Annotations can be checked before anything runs."""
    yes = [str, int, bool, type(None), float, list, dict, tuple, set, frozenset, bytes, date, datetime]
    yes += [time, timedelta, Decimal, UUID, Money, Colour]
    assert all(map(codec.recordable, yes))
    assert not any(map(codec.recordable, [Loose, Status, Text, Pair, object, Path, HttpRequest]))


# Comparing inputs.


def test_order_does_not_count_where_there_is_none():
    """Equal dicts and sets are one input, however they were filled."""
    one = {"a": 1, "b": {(1, 2): "x", 3: {"p", "q"}}, "m": {"$x": {"k": 1, "j": 2}}}
    two = {"m": {"$x": {"j": 2, "k": 1}}, "b": {3: {"q", "p"}, (1, 2): "x"}, "a": 1}
    assert canonical(one) == canonical(two)
    assert dumps(one) != dumps(two)


def test_members_of_a_set_may_hold_dicts():
    """A set is compared by what its members say, at every depth."""
    one = frozenset({Ordered(1, {"a": 1, "b": 2}), Ordered(1, {"a": 9})})
    two = frozenset({Ordered(1, {"b": 2, "a": 1}), Ordered(1, {"a": 9})})
    assert one == two
    assert canonical(one) == canonical(two)


@register_type(name="tests.Ordered")
@dataclass(frozen=True)
class Ordered:
    n: int
    extra: Any = field(hash=False)


# Values that == takes for equal, or nearly so, and that are another input all the same.
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({"1": 0}, {1: 0}),
        ("a", b"a"),
        (Rank.LOW, 1),
        (Decimal("1.0"), Decimal("1.00")),
        ([1, 2], [2, 1]),
        (datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC)),
        ({"$int": "f"}, 15),
    ],
)
def test_another_type_is_another_input(one, two):
    """Only what would come back as the same value is the same input."""
    assert canonical(one) != canonical(two)


@given(st.dictionaries(hashables, values, max_size=4), st.randoms(use_true_random=False))
def test_a_shuffled_dict_is_the_same_input(value, random):
    """No order of keys changes the text for comparing."""
    items = list(value.items())
    random.shuffle(items)
    assert canonical(dict(items)) == canonical(value)
    assert canonical(loads(dumps(value))) == canonical(value)


def test_nan_is_the_same_input_as_nan():
    """A start that is repeated with NaN in its input is a repeated start."""
    assert canonical([float("nan")]) == canonical([float("nan")])


PROGRAM = """
from loom_django.kernel.codec import canonical, dumps
words = {f"word-{n}" for n in range(50)}
value = [words, {frozenset({w, "x"}): {w} for w in sorted(words)}, {(w, b"y") for w in words}]
print(dumps(value), canonical([value, {w: 1 for w in words}]))
"""


def test_the_text_is_the_same_in_every_process():
    """Python's random order of sets does not reach the log."""
    root = Path(__file__).resolve().parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 1000
