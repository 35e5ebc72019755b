"""The backend over MPI, through mpi4py."""
