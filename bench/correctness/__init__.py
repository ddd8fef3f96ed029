"""What must be right before it is timed: accuracy and compiled code."""
