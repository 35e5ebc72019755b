"""The shared-memory backend, for ranks on one host."""
