"""The comms logger: what it counts, its table, and the ranks that others wait for."""
