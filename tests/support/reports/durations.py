"""Seconds of each file of tests; the longest run first, so that all workers end at about the same time.

`python -m tests.support.reports.durations REPORT.xml` writes them anew, from a report of ``make test``.
"""

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parent / "durations.json"
UNKNOWN_S = 20.0
"""Assumed for a new file, which runs after the files that are known to be long."""


def expected(file: Path) -> float:
    """Return the seconds of a file; its name counts, not its folder."""
    return _table().get(file.stem, UNKNOWN_S)


@cache
def _table() -> dict[str, float]:
    return json.loads(TABLE.read_text())  # type: ignore[no-any-return]


def measured(report: Path) -> dict[str, int]:
    """Return the seconds of each file in a report of ``pytest --junitxml``."""
    seconds: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        seconds[case.attrib["classname"]] += float(case.attrib["time"])  # type: ignore[assignment]
    found: dict[str, int] = {}
    for module, value in sorted(seconds.items()):
        name = module.rpartition(".")[2]
        found[name] = max(found.get(name, 0), round(value))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    TABLE.write_text(json.dumps(measured(Path(sys.argv[1])), indent=1) + "\n")
