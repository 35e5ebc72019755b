"""Traces: all ranks' calls in one file, on one clock."""
