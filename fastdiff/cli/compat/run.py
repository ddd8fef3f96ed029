"""Translation of other training scripts' command lines: the equivalent run in fastdiff, and the differences."""

import argparse
import difflib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from fastdiff import sanitize
from fastdiff.cli.compat import dit, iddpm
from fastdiff.cli.compat.diffusers.flux2_klein import FLUX2_KLEIN
from fastdiff.cli.compat.diffusers.qwen_image import QWEN_IMAGE
from fastdiff.cli.compat.diffusers.script import DiffusersScript
from fastdiff.cli.compat.diffusers.sd3 import SD3
from fastdiff.cli.compat.diffusers.text_to_image import OF_OTHERS, TEXT_TO_IMAGE, TEXT_TO_IMAGE_LORA
from fastdiff.cli.compat.diffusers.text_to_image_sdxl import SDXL, SDXL_LORA
from fastdiff.cli.compat.diffusers.z_image import Z_IMAGE
from fastdiff.cli.compat.kohya.script import KohyaScript
from fastdiff.cli.compat.kohya.sdxl import SDXL_FULL, SDXL_NETWORK
from fastdiff.cli.compat.names import ALIASES, TITLES
from fastdiff.cli.compat.translation import LAUNCH, CountImages, Translation, program
from fastdiff.config.command_line.train_flags import parse
from fastdiff.data.images.sources import count_images
from fastdiff.errors import ConfigError, FastdiffError
from fastdiff.terminal import fitted

_UNKNOWN = "unrecognized arguments: "
"""Start of argparse's message."""


class Script(NamedTuple):
    """Another trainer's script."""

    add_flags: Callable[[argparse.ArgumentParser], None]
    translate: Callable[[argparse.Namespace, int, CountImages], Translation]
    idle: Mapping[str, str]
    """Why a flag changes nothing, by its name; for those that some other flag makes so."""
    read: Callable[[argparse.ArgumentParser, Sequence[str]], argparse.Namespace] = argparse.ArgumentParser.parse_args
    """Parses a command line; scripts with files of flags read those, too."""


def _of_diffusers(script: DiffusersScript) -> Script:
    return Script(script.add_flags, script.translate, script.idle)


def _of_kohya(script: KohyaScript) -> Script:
    return Script(script.add_flags, script.translate, script.idle, script.read)


SCRIPTS = {
    "t2i": _of_diffusers(TEXT_TO_IMAGE),
    "t2i-lora": _of_diffusers(TEXT_TO_IMAGE_LORA),
    "train_text_to_image_sdxl": _of_diffusers(SDXL),
    "train_text_to_image_lora_sdxl": _of_diffusers(SDXL_LORA),
    "train_dreambooth_lora_flux2_klein": _of_diffusers(FLUX2_KLEIN),
    "train_dreambooth_lora_z_image": _of_diffusers(Z_IMAGE),
    "train_dreambooth_lora_sd3": _of_diffusers(SD3),
    "train_dreambooth_lora_qwen_image": _of_diffusers(QWEN_IMAGE),
    "sdxl_train_network": _of_kohya(SDXL_NETWORK),
    "sdxl_train": _of_kohya(SDXL_FULL),
    "dit": Script(dit.add_flags, dit.translate, {}),
    "iddpm": Script(iddpm.add_flags, iddpm.translate, iddpm.IDLE),
    "iddpm-sr": Script(iddpm.add_super_resolution_flags, iddpm.translate_super_resolution, iddpm.IDLE),
}
"""By the names of ``TITLES``."""
_OTHERS_DECIDE = "the other flags decide"
_MANY = 1_281_167
"""Images in every folder, where only flags are compared; a full epoch of any batch."""

_WIDEST = 74
"""Columns of arguments on one line, beside what a line begins and ends with."""


def translate(script: str, flags: Sequence[str], *, gpus: int) -> Translation:
    """Translate the flags of ``script``.

    Args:
        script: a key of ``SCRIPTS``, or the name of its file.
        flags: its command line, without the script's own name.
        gpus: number of its processes; its batch size is per process.

    Raises:
        ConfigError: a flag is unknown to the script, contradicts another one, or describes an invalid run.
    """
    name = ALIASES.get(script, script)
    known = SCRIPTS[name]
    parser = _Parser(prog=TITLES[name], add_help=False)  # abbreviations as the scripts accept them
    known.add_flags(parser)
    given = known.read(parser, list(flags))
    translation = known.translate(given, gpus, count_images)
    _check(_train_flags(translation))
    for action in idle_flags(parser, given, lambda others: known.translate(others, gpus, lambda *_, **__: _MANY)):
        reason = known.idle.get(action.dest, _OTHERS_DECIDE)
        translation.notes.append(f"{action.option_strings[0]} changes nothing: {reason}")
    return translation


def train_flags(script: str, flags: Sequence[str]) -> list[str]:
    """Return the trainer's flags for a run of ``script`` with one process; ConfigError as for ``translate``."""
    return _train_flags(translate(script, flags, gpus=1))


def in_words(translation: Translation, room: int | None = None) -> str:
    """Return the commands, ready for a shell, and then the differences, as comments.

    Args:
        translation: what the script's flags mean here.
        room: columns of the terminal, at which the comments are wrapped; None: one line each.
    """
    own = {"fastdiff": program()}
    commands = "\n".join(_broken([own.get(command[0], command[0]), *command[1:]]) for command in translation.commands)
    hidden = any(sanitize.argument(word) != word for command in translation.commands for word in command)
    told = [*translation.notes, *([sanitize.LEFT_OUT] if hidden else [])]
    notes = "\n".join(f"# - {sanitize.message(note)}" for note in told)
    return f"{commands}\n\n# Not the same:\n{fitted(notes, room)}" if notes else commands


def _train_flags(translation: Translation) -> list[str]:
    command = next(command for command in translation.commands if command[: len(LAUNCH)] == LAUNCH)
    return command[command.index("--") + 1 :]


def _check(flags: Sequence[str]) -> None:
    """Refuse now flags that the trainer would refuse later; it counts the images for epochs where they are."""
    words = ["--steps" if word == "--epochs" else word for word in flags]
    try:
        parse(words)
    except ConfigError as error:
        raise ConfigError(f"these flags describe an invalid run: {error}") from None


def _broken(command: Sequence[str]) -> str:
    """Format a command with one flag and its values per line; arguments before them only where one is long."""
    lines = [[command[0]]]
    for word in map(sanitize.argument, command[1:]):
        last = lines[-1]
        is_long = not last[0].startswith("--") and len(shlex.join([*last, word])) > _WIDEST
        if word.startswith("--") or is_long:
            lines.append([word])
        else:
            last.append(word)
    return " \\\n    ".join(shlex.join(line) for line in lines)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            message = _UNKNOWN + self._unknown(message.removeprefix(_UNKNOWN).split())
        raise ConfigError(f"{self.prog}: {message}; give its flags unchanged, after --")

    def _unknown(self, words: Sequence[str]) -> str:
        """Return the flags among words that argparse does not know, without their values, which may be secret."""
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        if not given:
            return "a value without a flag"
        if told := OF_OTHERS.get(given[0]):
            return f"{given[0]}, {told}"
        near = difflib.get_close_matches(given[0].replace("-", "_"), self._written, n=1)
        return ", ".join(given) + (f" (did you mean {self._written[near[0]]}?)" if near else "")

    @property
    def _written(self) -> dict[str, str]:
        """Flags as they are written, by their names with underscores."""
        return {name.replace("-", "_"): name for name in self._option_string_actions}


def idle_flags(
    parser: argparse.ArgumentParser, given: argparse.Namespace, translated: Callable[[argparse.Namespace], Translation]
) -> Iterator[argparse.Action]:
    """Yield the flags that have another value than their default, and the same translation as with it."""
    defaults, whole = _defaults(parser, given), translated(given)
    for action in parser._actions:
        value, default = getattr(given, action.dest), getattr(defaults, action.dest)
        if value != default and _same(given, action.dest, default, translated, whole):
            yield action


def _defaults(parser: argparse.ArgumentParser, given: argparse.Namespace) -> argparse.Namespace:
    """Return all flags at their defaults; those that must be given, as they are."""
    required = [action for action in parser._actions if action.required]
    return parser.parse_args([f"{action.option_strings[0]}={getattr(given, action.dest)}" for action in required])


def _same(
    given: argparse.Namespace,
    name: str,
    default: object,
    translated: Callable[[argparse.Namespace], Translation],
    whole: Translation,
) -> bool:
    try:
        return translated(argparse.Namespace(**{**vars(given), name: default})) == whole
    except FastdiffError:  # without it the flags contradict one another
        return False
