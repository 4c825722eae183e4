"""The how-to page's examples are tests, and here they run as they stand there."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

from asgiref.sync import async_to_sync
from django.test import override_settings

from tests.testing import flows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "testing.md"


def _examples() -> dict[str, Any]:
    """The blocks of the page, run one after the other as one module."""
    shop, shop_flows = types.ModuleType("shop"), types.ModuleType("shop.flows")
    vars(shop_flows).update(vars(flows))
    before = {name: sys.modules.get(name) for name in ("shop", "shop.flows")}
    sys.modules.update({"shop": shop, "shop.flows": shop_flows})
    names: dict[str, Any] = {"__name__": __name__}
    try:
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
            exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102  the page itself
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return names


def _awaited(example: Any) -> Any:
    def test() -> None:
        async_to_sync(example)()

    return test


for _name, _example in _examples().items():
    if _name.startswith("test_"):
        globals()[_name] = _awaited(_example) if inspect.iscoroutinefunction(_example) else _example
    elif _name == "OrderTests":
        OrderTests = override_settings(ROOT_URLCONF="tests.testing.test_program")(_example)


def test_the_examples_are_found() -> None:
    """A page without its blocks would pass too."""
    assert len([name for name in globals() if name.startswith("test_")]) == 10
    assert len([name for name in vars(OrderTests) if name.startswith("test_")]) == 2
