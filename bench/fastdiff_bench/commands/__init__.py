"""The subcommands of ``fastdiff bench``, one module each."""
