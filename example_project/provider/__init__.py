"""A payment service as its own process: what the outside world is for the shop.

``server`` runs it, ``ledger`` is its memory, ``client`` is what the shop calls it by. The server knows nothing of
Django or of loom_django.
"""
