"""Settings of the example. What differs between machines comes from the environment, or from .env beside manage.py."""

from datetime import timedelta
from pathlib import Path

import environ

BASE_DIR = Path(__file__).resolve().parent.parent
VAR = BASE_DIR / "example_project" / "var"

env = environ.Env()
if (BASE_DIR / ".env").exists():
    env.read_env(BASE_DIR / ".env")

DEBUG = env.bool("DEBUG", False)
SECRET_KEY = env.str("SECRET_KEY", "for the example only: it is public")
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["127.0.0.1", "localhost"])

if not env.str("DATABASE_URL", ""):
    VAR.mkdir(exist_ok=True)
DATABASES = {"default": env.db_url("DATABASE_URL", f"sqlite:///{VAR / 'shop.sqlite3'}")}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # Web, worker and timer processes share the file: readers must not block the writer, and a transaction that
    # reads before it writes must wait for its turn instead of failing.
    DATABASES["default"]["OPTIONS"] = {
        "init_command": "PRAGMA journal_mode=WAL",
        "timeout": 20,
        "transaction_mode": "IMMEDIATE",
    }

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "loom_django",
    "example_project.shop",
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
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True

# Flows are run by `manage.py run_loom_worker`. A process that died is noticed when its lease is over.
LOOM = {
    "DISPATCHER": env.str("LOOM_DISPATCHER", "worker"),
    "LEASE_TTL": env.float("LOOM_LEASE_TTL", 60),
    "LEASE_RENEW_INTERVAL": env.float("LOOM_LEASE_RENEW_INTERVAL", 15),
}

SHOP_PROVIDER_URL = env.str("SHOP_PROVIDER_URL", "http://127.0.0.1:8100")
# How long a customer may give things back, after which an order is closed.
SHOP_RETURN_PERIOD = timedelta(seconds=env.float("SHOP_RETURN_PERIOD", 14 * 86_400))

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {"loom_django": {"handlers": ["console"], "level": env.str("LOOM_LOG_LEVEL", "INFO")}},
}
