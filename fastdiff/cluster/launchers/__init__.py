"""Launchers of a run on many machines: Slurm, ssh, Kubernetes."""
