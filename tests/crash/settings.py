"""The tests' settings for the processes that these tests start, with what a test wants otherwise.

LOOM_TEST_LOOM       the LOOM setting, as JSON
LOOM_TEST_ALIAS      loom's database under this alias, and a "default" that refuses whatever it is asked
LOOM_TEST_TIME_ZONE  the setting TIME_ZONE
"""

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES as BASE
from tests.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "tests.crash"]
LOOM = json.loads(os.environ.get("LOOM_TEST_LOOM", "{}"))
TIME_ZONE = os.environ.get("LOOM_TEST_TIME_ZONE", "UTC")

if alias := os.environ.get("LOOM_TEST_ALIAS"):
    DATABASES = {"default": {}, alias: BASE["default"]}
    DATABASE_ROUTERS = ["tests.crash.routing.AllToAlias"]
    LOOM = {**LOOM, "DATABASE": alias}
