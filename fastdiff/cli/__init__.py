"""The ``fastdiff`` command, one module per subcommand."""
