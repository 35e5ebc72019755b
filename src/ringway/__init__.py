"""One communication layer for PyTorch."""
