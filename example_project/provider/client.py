"""How the shop calls its provider.

The point of this module is to tell three kinds of failure apart, since they call for three different answers:
the request never left (try again), the provider said no (a fact), and nobody knows (ask a person, or repeat it
under the same key if the provider knows keys).
"""

from __future__ import annotations

import http.client
import json
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

TIMEOUT = 30.0


class ProviderUnreachable(Exception):
    """The request never left this machine: certainly nothing happened."""


class ProviderRefused(Exception):
    """The provider answered no: certainly nothing happened."""


class ProviderSilent(Exception):
    """The request left and no answer came: nobody here knows what happened."""


def charge(reference: str, amount: Decimal, *, key: str) -> str:
    """Take the customer's money; returns the charge's id."""
    return _post("/charges", key, {"reference": reference, "amount": str(amount)})


def refund(reference: str, amount: Decimal, *, key: str) -> str:
    """Give it back; returns the refund's id."""
    return _post("/refunds", key, {"reference": reference, "amount": str(amount)})


def transfer(reference: str, iban: str, amount: Decimal, *, key: str) -> str:
    """Send money to a bank account; returns the transfer's id. The bank does not look at the key."""
    return _post("/transfers", key, {"reference": reference, "iban": iban, "amount": str(amount)})


def _post(path: str, key: str, body: dict[str, Any]) -> str:
    connection = http.client.HTTPConnection(urlsplit(settings.SHOP_PROVIDER_URL).netloc, timeout=TIMEOUT)
    try:
        connection.connect()
    except OSError as exc:
        raise ProviderUnreachable(f"{settings.SHOP_PROVIDER_URL}: {exc}") from exc
    try:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise ProviderSilent(f"no answer to POST {path}: {type(exc).__name__}") from exc
    finally:
        connection.close()
    if response.status >= 500:
        raise ProviderSilent(f"POST {path}: answered {response.status}")
    if response.status >= 400:
        raise ProviderRefused(answer["error"])
    return str(answer["id"])
