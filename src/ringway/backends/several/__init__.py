"""Backends that combine others: by policy, or in two levels across hosts."""
