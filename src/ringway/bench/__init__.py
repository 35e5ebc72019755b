"""Measuring collectives: cases, a runner that interleaves candidates, and tables."""
