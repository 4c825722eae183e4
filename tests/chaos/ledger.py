"""Where the outside world keeps its books; importable before Django is set up."""

LEDGER = "LOOM_CHAOS_LEDGER"
