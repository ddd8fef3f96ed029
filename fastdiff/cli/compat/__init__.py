"""Translation of the command lines of other trainers."""
