"""Flow bodies are read as text for what a replay would do otherwise; nothing of a project is run for it."""

from __future__ import annotations

from loom_django.lint.bodies import Finding, findings_in
from loom_django.lint.rules import IDS
from loom_django.lint.sources import Sources

__all__ = ["IDS", "Finding", "Sources", "findings_in"]
