"""The crash tests' settings with Celery as the task backend, as a project would have it.

LOOM_TEST_REDIS_URL  the broker
"""

import os

from tests.crash.settings import *  # noqa: F403
from tests.crash.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "django_tasks_fennel"]
TASKS = {"default": {"BACKEND": "django_tasks_fennel.CeleryBackend"}}
CELERY_BROKER_URL = os.environ["LOOM_TEST_REDIS_URL"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# A broker that is away is given up after one more try, so that a caller is not held up.
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 1, "interval_start": 0}
