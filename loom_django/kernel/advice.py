"""For every class whose instances cannot be recorded there is a sentence that says what to pass instead.

Classes of Django and of other packages are known by name only: nothing of them is imported here.
"""

from __future__ import annotations

from dataclasses import is_dataclass

from loom_django.errors import class_name

_AS_LIST = "Pass list(value)."
_AS_BYTES = "Pass bytes(value)."
_BY_NAME = "Pass its name as text and look it up in a tool."
_FILE = "Store the file and pass its name or key."

# The first row that is a base of the class speaks: special kinds stand above the plain types they are.
_ADVICE = {
    "enum.Enum": "Register its class with register_type, or pass its .value.",
    "django.db.models.base.Model": "Pass its pk and load the row in a tool.",
    "django.db.models.query.QuerySet": 'Pass list(queryset.values_list("pk", flat=True)).',
    "django.db.models.manager.BaseManager": "Query in a tool and return plain values.",
    "django.utils.functional.Promise": "Lazy values change with the language: pass str(value).",
    "django.utils.functional.LazyObject": "Pass the pk, or the plain value, of what it stands for.",
    "django.utils.datastructures.MultiValueDict": "Pass value.dict(), or dict(value.lists()).",
    "django.http.request.HttpRequest": "Pass the values that are needed from the request.",
    "django.http.response.HttpResponseBase": "Pass the values that are needed from the response.",
    "django.core.files.utils.FileProxyMixin": _FILE,
    "_io._IOBase": _FILE,
    "tempfile._TemporaryFileWrapper": _FILE,
    "numpy.generic": "Pass value.item().",
    "numpy.ndarray": "Pass value.tolist().",
    "builtins.BaseException": "Pass str(error), or raise it: failures are recorded by themselves.",
    "builtins.coroutine": "Await it first and pass its result.",
    "builtins.async_generator": "Pass the list of what it yields.",
    "builtins.type": _BY_NAME,
    "builtins.module": _BY_NAME,
    "builtins.function": _BY_NAME,
    "builtins.method": _BY_NAME,
    "builtins.builtin_function_or_method": _BY_NAME,
    "functools.partial": _BY_NAME,
    "builtins.range": _AS_LIST,
    "builtins.dict_keys": _AS_LIST,
    "builtins.dict_values": _AS_LIST,
    "builtins.dict_items": _AS_LIST,
    "collections.deque": _AS_LIST,
    "array.array": _AS_LIST,
    "builtins.bytearray": _AS_BYTES,
    "builtins.memoryview": _AS_BYTES,
    "builtins.complex": "Pass [value.real, value.imag].",
    "fractions.Fraction": "Pass str(value).",
    "re.Pattern": "Pass value.pattern.",
    # str(value) would give a SafeString back as it is.
    "builtins.str": 'Pass a plain str: value + "".',
    "builtins.int": "Pass a plain int: int(value).",
    "builtins.float": "Pass a plain float: float(value).",
    "builtins.bytes": "Pass plain bytes: bytes(value).",
    "builtins.list": "Pass a plain list: list(value).",
    "builtins.tuple": "Pass a plain tuple: tuple(value).",
    "builtins.set": "Pass a plain set: set(value).",
    "builtins.frozenset": "Pass a plain frozenset: frozenset(value).",
    "builtins.dict": "Pass a plain dict: dict(value).",
    "datetime.datetime": "Pass a plain datetime.datetime.",
    "datetime.date": "Pass a plain datetime.date.",
    "datetime.time": "Pass a plain datetime.time.",
    "datetime.timedelta": "Pass a plain datetime.timedelta.",
    "decimal.Decimal": "Pass a plain Decimal: Decimal(value).",
    "uuid.UUID": "Pass a plain UUID: UUID(int=value.int).",
}
_OTHERWISE = (
    "Pass plain data: a dict of its values, a registered dataclass, or an id to load it by in a tool."
)


def type_name(cls: type) -> str:
    """The class as messages show it: a built-in one without its module."""
    return class_name(cls).removeprefix("builtins.")


def instead_of(cls: type) -> str:
    """Say what to pass where an instance of `cls` was handed in."""
    bases = {class_name(base) for base in cls.__mro__}
    if is_dataclass(cls) and "enum.Enum" not in bases:
        return "Register its class with register_type."
    for name, advice in _ADVICE.items():
        if name in bases:
            return advice
    if hasattr(cls, "__next__"):
        return _AS_LIST
    return "Pass str(value)." if hasattr(cls, "__fspath__") else _OTHERWISE
