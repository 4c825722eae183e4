"""What goes on around executions; each service does one bounded piece per tick."""
