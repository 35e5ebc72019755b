"""Groups: the communicator, how it issues calls, its checks, and the world that registers all groups."""
