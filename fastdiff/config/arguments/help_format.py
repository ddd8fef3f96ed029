"""The form of ``--help`` of all commands: a short usage, whole paragraphs, and examples that can be copied."""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from fastdiff.terminal import fitted

_NUMBERS = {int: "N", "int": "N", float: "X", "float": "X"}
"""Placeholders by what the type of an argument returns."""


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that sums up the flags in the usage, and breaks no name at its hyphens."""

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        shown = [action for action in actions if action.help != argparse.SUPPRESS]
        flags = [action for action in shown if action.option_strings]
        words = [f"{flag.option_strings[-1]} {self._of_flag(flag)}" for flag in flags if flag.required]
        words += ["[FLAGS]"] * any(not flag.required for flag in flags)
        words += [self._of_position(action) for action in shown if not action.option_strings]
        whole = (usage or " ".join(["%(prog)s", *words])) % {"prog": self._prog}
        return super()._format_usage("\n           ".join(wrapped(whole, self._width - 11)), (), (), prefix)

    def _of_flag(self, flag: argparse.Action) -> str:
        return self._format_args(flag, self._get_default_metavar_for_optional(flag))

    def _of_position(self, action: argparse.Action) -> str:
        if action.nargs == argparse.REMAINDER:
            return f"[{action.metavar or '...'}]"
        return self._format_args(action, self._get_default_metavar_for_positional(action))

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        of = getattr(action.type, "func", action.type)
        found = of if isinstance(of, type) else getattr(of, "__annotations__", {}).get("return")
        return _NUMBERS.get(found) or super()._get_default_metavar_for_optional(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n[ \t]*\n", text.strip("\n").replace("``", "`"))
        return textwrap.indent("\n\n".join(_filled(paragraph, width) for paragraph in paragraphs), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)


def _filled(paragraph: str, width: int) -> str:
    """Wrap prose; indented lines, such as examples, stay lines of their own."""
    if re.search(r"^\s", paragraph, re.MULTILINE):
        return fitted(paragraph, width)
    return "\n".join(wrapped(paragraph, width))


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines that are broken only at blanks."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def sentence(text: str) -> str:
    """Return the purpose of a command as its description."""
    return f"{text[:1].upper()}{text[1:]}."
