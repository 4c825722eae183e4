from tests.engine.conftest import world

__all__ = ["world"]
