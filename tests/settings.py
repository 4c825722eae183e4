"""Settings of the test suite, for both databases.

LOOM_TEST_DATABASE      sqlite (default) or postgresql
LOOM_TEST_POSTGRES_URL  the PostgreSQL to use; without it one is started (tests/postgres.py)
LOOM_TEST_SQLITE_PATH   the SQLite file; a process that a test starts is given the test database's own
"""

import os
import tempfile
from pathlib import Path

import environ

from tests import postgres

env = environ.Env()

database = env.str("LOOM_TEST_DATABASE", "sqlite")
if database == "postgresql":
    DATABASES = {
        "default": {**env.db_url_config(postgres.url_for_this_process()), "TEST": {"NAME": "test_loom"}},
    }
elif database == "sqlite":
    # A file, never memory: threads and processes must meet in it. One per process, so that runs do not meet.
    path = env.str(
        "LOOM_TEST_SQLITE_PATH", str(Path(tempfile.gettempdir(), f"loom-test-{os.getpid()}.sqlite3"))
    )
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": path,
            "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL", "timeout": 30},
            "TEST": {"NAME": f"{path}.test"},
        },
    }
else:
    raise RuntimeError(f"LOOM_TEST_DATABASE={database}: sqlite or postgresql.")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_tasks_db",
    "loom_django",
    "tests.shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
# The fast hasher: no test is about passwords, and many log somebody in.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "tests.urls"
SECRET_KEY = "tests only"
STATIC_URL = "static/"
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
TIME_ZONE = "UTC"
USE_TZ = True
