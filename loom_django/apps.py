"""The app: checks, signals and the discovery of ``flows`` modules; nothing starts here."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class LoomConfig(AppConfig):
    name = "loom_django"
    label = "loom"
    verbose_name = _("Loom: durable flows")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from loom_django import checks  # noqa: F401  registers the checks; needs the models

        autodiscover_modules("flows")
