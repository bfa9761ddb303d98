"""The table that a fault program ends with."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """One activity, struck in one way: how often, how often its results were the same afterwards, what was found."""

    activity: str
    how: str
    struck: int = 0
    same: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, findings: list[str]) -> None:
        """Note one more strike and what was wrong after it."""
        self.struck, self.same = self.struck + 1, self.same + (not findings)
        self.findings += findings

    def __str__(self) -> str:
        return f"| {self.activity} | {self.how} | {self.struck} | {self.same} | {len(self.findings)} |"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown, with their sum."""
    total = [str(sum(values)) for values in zip(*((r.struck, r.same, len(r.findings)) for r in rows), strict=True)]
    head = ["| activity | how | times | identical after restart | findings |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(str, rows), f"| all | | {' | '.join(total)} |"])
