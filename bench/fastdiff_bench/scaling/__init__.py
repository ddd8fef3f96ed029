"""Model of multi-rank training: messages, their times, and the projection from one GPU."""
