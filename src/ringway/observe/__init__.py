"""Observing: the recorder, and the listeners that follow groups and their calls."""
