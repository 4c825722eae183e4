"""Where logs, timers, messages and leases live."""
