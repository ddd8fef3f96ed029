"""``fastdiff demo``: five minutes in which a run is killed, resumes, and equals one that was left alone."""
