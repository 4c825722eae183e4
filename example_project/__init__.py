"""A small shop that is built on loom_django, and the demo that kills its worker."""
