"""The backend interface, the registry, the choice of a backend, and one folder per library."""
