"""The tests' settings for a site of its own: a database that nobody else uses, and a fleet of workers."""

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES
from tests.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "tests.chaos"]
LOOM = {
    "DISPATCHER": "worker",
    "LEASE_TTL": 4,
    "LEASE_RENEW_INTERVAL": 1,
    "POLL_INTERVAL": 0.2,
}
if DATABASES["default"]["ENGINE"].endswith("postgresql"):
    DATABASES["default"]["CONN_MAX_AGE"] = 60
