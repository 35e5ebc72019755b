"""Faces that other libraries' programs know."""
