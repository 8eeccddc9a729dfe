"""What a run chose, and how far to trust its draws, to print and to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True)
class Report:
    """What a run chose, and how far to trust its draws.

    `str(report)` is the text, whose first line is the verdict; `report.verdict` is `"yes"`, `"no"`,
    `"unknown"` or `"ensemble"`; `to_frame()` has a row for each site.  Yes means that every check
    says that posterior means are within 0.1 posterior sds and sds within 5%, Monte Carlo errors
    apart.  What could not be checked is unknown.  An ensemble is of networks whose chains do not
    agree in what they predict, or of temperature 0.

    Attributes:
        verdict: of the run.
        findings: of every check, those that fail first.
        choices: what was chosen, in words.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        if self.verdict == "yes":
            return (
                "YES: every check puts posterior means within 0.1 sds and sds within 5% of the "
                "posterior's"
            )
        first = next(f for f in self.findings if f.verdict == self.verdict)
        where = f"site '{first.site}': " if first.site else ""
        advice = f"; try: {first.advice}" if first.advice else ""
        kind = {"no": "NO", "unknown": "NOT KNOWN", "ensemble": "ENSEMBLE, not posterior"}[
            self.verdict
        ]
        return f"{kind}: {where}{first.told}{advice}"

    def to_frame(self) -> Any:
        """A DataFrame, one row a site and check."""
        import pandas

        return pandas.DataFrame([asdict(finding) for finding in self.findings])

    @classmethod
    def of(cls, findings: Sequence[Finding], choices: Mapping[str, str]) -> Report:
        """The report of findings in any order."""
        order = {"ensemble": 0, "no": 1, "unknown": 2, "yes": 3}
        ranked = sorted(findings, key=lambda finding: order[finding.verdict])
        return cls(worst([finding.verdict for finding in ranked]), tuple(ranked), choices)

    def of_site(self, name: str) -> Verdict:
        """The verdict on one site: that of the run's own checks counts for all."""
        return worst([f.verdict for f in self.findings if f.site in ("", name)])

    def to_json(self) -> str:
        """The report as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote."""
        held = json.loads(text)
        return cls(held["verdict"], tuple(Finding(**f) for f in held["findings"]), held["choices"])

    def __str__(self) -> str:
        lines = [self.headline, ""]
        lines += [f"{name}: {told}" for name, told in self.choices.items()]
        lines.append("")
        titles = {"ensemble": "ensemble", "no": "off", "unknown": "not known", "yes": "checked"}
        for verdict, title in titles.items():
            for finding in self.findings:
                if finding.verdict == verdict:
                    where = f"{finding.site}: " if finding.site else ""
                    lines.append(f"[{title}] {finding.check}: {where}{finding.told}")
        return "\n".join(lines)


#: Whether means and sds are within a tenth of a posterior sd, and 5%; or whether draws are those of
#: an ensemble, which is not the posterior.
Verdict: TypeAlias = Literal["yes", "no", "unknown", "ensemble"]


@dataclass(frozen=True)
class Finding:
    """One check of one site.

    Attributes:
        site: whose; empty for the whole run.
        check: what was looked at.
        verdict: of the check.
        told: what was found, with figures.
        advice: what to try.
    """

    site: str
    check: str
    verdict: Verdict
    told: str
    advice: str = ""


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Ensemble, if any is; else no, if any is; else unknown, if any is."""
    kinds: tuple[Verdict, ...] = ("ensemble", "no", "unknown")
    return next((kind for kind in kinds if kind in verdicts), "yes")
