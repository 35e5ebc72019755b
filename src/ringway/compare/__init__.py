"""Compares the ranks' calls: what must agree between ranks, on one host and across hosts."""
