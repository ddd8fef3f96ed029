"""The page of runs: what ``fastdiff watch`` serves live and ``fastdiff report`` writes to one file."""
