"""The supervisor: one process per node that starts and watches its ranks."""
