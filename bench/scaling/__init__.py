"""A model of many ranks: messages, their times, and the projection from one GPU."""
