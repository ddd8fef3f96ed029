"""What several ranks cost: their messages and times, copies of the engine, and the host."""
