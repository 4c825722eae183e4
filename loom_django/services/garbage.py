"""Python's collection of cyclic garbage, made rare for a process that runs bodies and does nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# The youngest objects are looked through when so many live on. Bodies that wait for a commit keep theirs for
# milliseconds: at Python's own 700 most of what a collection visits is in use, and is soon visited again.
YOUNG: Final = 10_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect seldom meanwhile, and never among what is there now: Django, the project, their modules.

    Where somebody has switched collections off or made them rarer still, that stands.
    """
    before = gc.get_threshold()
    if not gc.isenabled() or before[0] == 0:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(YOUNG, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
