"""Watching: what the recorder and the observers saw."""
