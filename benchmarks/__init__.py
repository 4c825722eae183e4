"""What loom costs, always as a ratio to a bare loop over the driver that was measured in the same run."""
