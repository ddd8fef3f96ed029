"""What can go wrong, one class per exit code.

A message says what was given, what was expected and what to do. ``train.py`` and ``cli.py`` print it without a
traceback and exit with ``exit_code``; anything else is a bug in fastdiff and keeps its traceback.
"""


class FastdiffError(Exception):
    """Base of every error that a user can cause or must know about."""

    exit_code = 70

    def __init__(self, message: str, *, everywhere: bool | None = None) -> None:
        super().__init__(message)
        self.everywhere = self.usually_everywhere if everywhere is None else everywhere
        """True when every rank raises it, so that rank 0 alone prints it."""

    usually_everywhere = False


class ConfigError(FastdiffError):
    """The command line, a configuration file or the run folder does not fit."""

    exit_code = 2
    usually_everywhere = True


class DataError(FastdiffError):
    """A shard, an index or a sample is missing, damaged or of another shape than declared."""

    exit_code = 65


class DivergedError(FastdiffError):
    """The training produced non-finite numbers and cannot go on."""

    exit_code = 70
    usually_everywhere = True


class StorageError(FastdiffError):
    """A file could not be written or read back: no space, no permission, input/output error."""

    exit_code = 74
