"""Errors by which DeepSpeed refuses its JSON, in place of its tracebacks."""

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.config import DeepSpeedConfigError
from pydantic import ValidationError

from fastdiff.errors import ConfigError


@contextmanager
def refusals() -> Iterator[None]:
    """Raise ConfigError where DeepSpeed raises an error about a field of the JSON."""
    try:
        yield
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise _refused(wrong) from error
    except (AssertionError, DeepSpeedConfigError) as error:
        raise _refused(str(error)) from error


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"DeepSpeed refuses the DeepSpeed JSON: {reason.strip()}; correct or remove that field, or use "
        "--deepspeed_config zero1, zero2 or zero3"
    )
