from tests.crash.conftest import lab, zygotes

__all__ = ["lab", "zygotes"]
