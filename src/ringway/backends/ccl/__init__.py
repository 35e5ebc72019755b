"""The backend over Intel's oneCCL."""
