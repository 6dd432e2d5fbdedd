"""Check every family in examples/families, and write the table of its README.md.

python -m tests.examples.family_table
"""

from __future__ import annotations

from ligermodels.integrations.check_family import BOUNDS, check_family
from tests import outside

PAGE = outside.FOLDER / "README.md"
START, END = "<!-- written by tests/examples/family_table.py -->\n", "<!-- end of the table -->\n"


def lines_of(name: str) -> int:
    """Return the number of lines of a family's file."""
    return len((outside.FOLDER / f"{name}.py").read_text().splitlines())


def main() -> None:
    """Write the table, if every check passes."""
    table = [f"| file | lines | {' | '.join(BOUNDS)} |", "|---" * (2 + len(BOUNDS)) + "|"]
    for name in outside.NAMES:
        report = check_family(outside.family(name))
        print(report)
        if not report.ok:
            raise SystemExit(1)
        worst = report.worst()
        cells = [str(worst[check]) for check in BOUNDS]
        table.append(f"| `{name}.py` | {lines_of(name)} | {' | '.join(cells)} |")
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + "\n".join(table) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
