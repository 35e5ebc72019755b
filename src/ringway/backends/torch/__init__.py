"""The backend over torch's own process groups, such as gloo."""
