"""Commands that start ranks: on this machine, on the hosts of a file, by SLURM or by MPI."""
