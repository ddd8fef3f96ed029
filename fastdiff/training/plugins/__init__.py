"""Networks, losses and callbacks of users in a run: opened, and checked against the promises of a run."""
