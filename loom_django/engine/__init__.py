"""Running one execution: its context, its journal, its effects."""
