"""Other libraries doing the same work in the same run; each is installed into a venv of its own, and none is needed."""
