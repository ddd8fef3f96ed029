"""The cause of a rank's failure: explained for its user, and noted for the supervisor."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastdiff import errors, sanitize
from fastdiff.errors import FastdiffError, OutOfMemoryRestart, Preempted
from fastdiff.parallel.determinism import explain_nondeterminism
from fastdiff.parallel.heartbeat import note_failure


def explained(error: Exception) -> Exception:
    """Return the error with the cause and the remedy for one of the file system or of torch, any other as it is."""
    return explain_nondeterminism(error) or errors.explained(error)


@contextmanager
def noted() -> Iterator[None]:
    """Record the cause of an error at once, before other ranks that wait for this one notice."""
    try:
        yield
    except Exception as error:
        note(error)
        raise


def note(error: Exception) -> None:
    """Record the cause for a supervisor; a requested stop has none."""
    if isinstance(error, Preempted):
        return
    error = explained(error)
    if isinstance(error, FastdiffError):
        smaller = error.micro if isinstance(error, OutOfMemoryRestart) else None
        note_failure(error.exit_code, sanitize.message(str(error)), micro=smaller)
    else:
        note_failure(1, sanitize.message(f"{type(error).__name__}: {error}"))
