"""The ranks of a run: process group, agreement, heartbeat, preemption and their slices of the weights."""
