"""Which people have which of loom's permissions, as Django's own backend grants them."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db.models import Q

ALL = "superuser"


def holders() -> dict[str, list[dict[str, Any]]]:
    """The active users with each permission: ``{"loom.…": [{"user": name, "by": [how]}]}``, in order of name.

    ``by`` holds "superuser", "directly" and the names of groups. Three queries, whoever there is.
    """
    own = Permission.objects.filter(content_type__app_label="loom").order_by("codename")
    found: dict[str, list[dict[str, Any]]] = {f"loom.{permission.codename}": [] for permission in own}
    named = {permission.pk: f"loom.{permission.codename}" for permission in own}
    users = get_user_model()._default_manager
    wanted = (
        Q(is_superuser=True) | Q(user_permissions__in=list(named)) | Q(groups__permissions__in=list(named))
    )
    rows = (
        users.filter(wanted, is_active=True)
        .distinct()
        .prefetch_related("user_permissions", "groups__permissions")
    )
    for user in sorted(rows, key=lambda user: str(user.get_username())):
        for permission, by in _granted(user, named).items():
            found[permission].append({"user": user.get_username(), "by": by})
    return found


def _granted(user: Any, named: dict[int, str]) -> dict[str, list[str]]:
    granted: dict[str, list[str]] = {}
    if user.is_superuser:
        return {name: [ALL] for name in named.values()}
    for permission in user.user_permissions.all():
        if permission.pk in named:
            granted.setdefault(named[permission.pk], []).append("directly")
    for group in user.groups.all():
        for permission in group.permissions.all():
            if permission.pk in named:
                granted.setdefault(named[permission.pk], []).append(f"group {group.name}")
    return granted
