from tests.crash.conftest import lab, make_lab, zygotes

__all__ = ["lab", "make_lab", "zygotes"]
