"""Codecs: fewer bytes for a tensor, and back."""
