"""Where ranks are started: this machine, hosts of a file, SLURM, MPI."""
