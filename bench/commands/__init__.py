"""The subcommands of ``python -m bench``, one module each."""
