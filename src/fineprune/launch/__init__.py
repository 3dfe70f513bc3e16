"""Command lines that start fineprune in other processes: torchrun and Slurm."""
