"""``python -m fastdiff``: the ``fastdiff`` command of this interpreter."""

from fastdiff.cli.main import entry

if __name__ == "__main__":
    entry()
