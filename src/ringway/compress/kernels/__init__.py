"""Kernels: the steps of a compressed collective in plain torch, C++ and Triton."""
