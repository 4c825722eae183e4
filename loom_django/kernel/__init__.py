"""The pure part of loom_django: no Django, no I/O, no clock and no randomness of its own.

Equal arguments give equal answers, in every process and at any time.
"""
