"""Commands that start ranks: on this machine, on the hosts of a hostfile, with SLURM or with MPI."""
