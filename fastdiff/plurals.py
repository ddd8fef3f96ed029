"""Counts of things in words."""


def counted(count: int, what: str, plural: str = "s") -> str:
    """Return ``1 pack``, ``2 packs``; ``plural`` is what more than one, or none, add to the word."""
    return f"{count} {what}{plural if count != 1 else ''}"
