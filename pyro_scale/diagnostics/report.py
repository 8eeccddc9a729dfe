"""The report of a run: its findings in order of severity, and the verdict on its draws."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import pandas

#: Whether means are within 0.1 posterior sds and sds within 5%; or whether draws are those of an
#: ensemble, which is not the posterior.
Verdict: TypeAlias = Literal["yes", "no", "unknown", "ensemble"]

#: Difference of temperatures that is not told.
_SAME = 1e-3
#: Verdicts by precedence, the highest first: (headline, mark of a finding).
_TITLES: dict[Verdict, tuple[str, str]] = {
    "ensemble": ("ENSEMBLE, not posterior", "ensemble"),
    "no": ("NO", "off"),
    "unknown": ("NOT KNOWN", "not known"),
    "yes": ("YES", "checked"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check of one site, or of the whole run.

    Attributes:
        site: name of the site; empty for the whole run.
        check: name of the check.
        verdict: verdict of the check: "yes" if passed, "no", "unknown" or "ensemble".
        told: the result in words, with figures.
        advice: what to try.
        severity: how many times over its limit the result is; 0 if it was not measured. Orders
            findings of the same verdict, and is not kept in files.
    """

    site: str
    check: str
    verdict: Verdict
    told: str
    advice: str = ""
    severity: float = field(default=0.0, compare=False, repr=False)

    def to_dict(self) -> dict[str, str]:
        """The fields of the finding by name, as a report's table and file have them: all but
        `severity`."""
        fields = asdict(self)
        del fields["severity"]
        return fields

    def __str__(self) -> str:
        return f"site '{self.site}': {self.told}" if self.site else self.told


@dataclass(frozen=True)
class Report:
    """How far to trust a run's draws, by the results of all checks, and what tuning chose for the
    run.

    `str(report)` is the text, whose first line is the verdict; `report.verdict` is `"yes"`, `"no"`,
    `"unknown"` or `"ensemble"`; `to_frame()` has a row for each site and check. Yes means that
    every check puts posterior means within 0.1 posterior sds and sds within 5%, apart from Monte
    Carlo errors. What could not be checked is unknown. An ensemble is a network whose chains do not
    agree in their predictions, or a run at temperature 0.

    Attributes:
        verdict: verdict of the run.
        findings: results of all checks: those that decide the verdict first, the worst of them
            before others.
        choices: reasons of the settings that tuning chose, in words, by setting.
        temperatures: lowest and highest temperature that the draws were to have; they are draws of
            the posterior if both are 1.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    choices: Mapping[str, str] = field(default_factory=dict)
    temperatures: tuple[float, float] = 1.0, 1.0

    @classmethod
    def from_findings(
        cls,
        findings: Sequence[Finding],
        choices: Mapping[str, str],
        temperatures: tuple[float, float] = (1.0, 1.0),
    ) -> Report:
        """The report made of these findings, sorted so that those which decide the verdict come
        first, the worst of them before others. The verdict is "ensemble" if any finding says so,
        otherwise "no", "unknown" or "yes".

        Args:
            findings: results of all checks, in any order.
            choices: reasons of the settings that tuning chose, by setting.
            temperatures: lowest and highest temperature that the draws were to have.
        """
        verdicts = list(_TITLES)

        def rank(finding: Finding) -> tuple[int, float]:
            severity = math.inf if math.isnan(finding.severity) else finding.severity
            passed = finding.verdict == "yes"
            return verdicts.index(finding.verdict), 0.0 if passed else -severity

        ranked = sorted(findings, key=rank)
        return cls(_decide(ranked), tuple(ranked), choices, temperatures)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report from the JSON text that `to_json` returned, as a saved run's facts have it."""
        fields = json.loads(text)
        findings = tuple(Finding(**finding) for finding in fields.pop("findings"))
        low, high = fields.pop("temperatures", (1.0, 1.0))
        return cls(findings=findings, temperatures=(low, high), **fields)

    def to_json(self) -> str:
        """The report as JSON text, for `from_json`; severities are left out."""
        return json.dumps(
            {
                "verdict": self.verdict,
                "findings": [finding.to_dict() for finding in self.findings],
                "choices": dict(self.choices),
                "temperatures": self.temperatures,
            }
        )

    def to_frame(self) -> pandas.DataFrame:
        """A pandas DataFrame with a row for each finding and the columns site, check, verdict, told
        (the result in words) and advice."""
        import pandas

        return pandas.DataFrame([finding.to_dict() for finding in self.findings])

    def of_site(self, name: str) -> Verdict:
        """The verdict on one site: "ensemble" if any finding on the site or on the whole run says
        so, otherwise "no", "unknown" or "yes", the first that any of these findings has."""
        return _decide([finding for finding in self.findings if finding.site in ("", name)])

    @property
    def headline(self) -> str:
        """The report's first line: the verdict, the worst finding and what to try; for "yes", what
        that means, and at which temperature draws are if they are not of the posterior."""
        title, _ = _TITLES[self.verdict]
        if self.verdict == "yes":
            text = f"{title}: every check puts posterior means within 0.1 sds and sds within 5% of "
            return text + _target(*self.temperatures)
        worst = self.findings[0]
        advice = f"; try: {worst.advice}" if worst.advice else ""
        return f"{title}: {worst}{advice}"

    def __str__(self) -> str:
        lines = [self.headline, ""]
        lines += [f"{name}: {reason}" for name, reason in self.choices.items()]
        lines.append("")
        for finding in self.findings:
            site = f"{finding.site}: " if finding.site else ""
            _, mark = _TITLES[finding.verdict]
            lines.append(f"[{mark}] {finding.check}: {site}{finding.told}")
        return "\n".join(lines)


def _target(low: float, high: float) -> str:
    """Whose means and sds a YES is about, as a phrase: the posterior's, or, where temperatures of
    draws are others than 1, those at these temperatures, and how to sample the posterior."""
    if abs(low - 1) < _SAME and abs(high - 1) < _SAME:
        return "the posterior's"
    if high - low >= _SAME:
        return f"those at temperatures of {low:.4g} to {high:.4g}; for the posterior: temperature=1"
    width = "wider" if low > 1 else "narrower"
    return f"those at temperature {low:.4g}, {width} than the posterior; for that: temperature=1"


def _decide(findings: Sequence[Finding]) -> Verdict:
    """The verdict that follows from several findings: "ensemble" if any finding says so; otherwise
    "no", "unknown" or "yes", the first that any finding has; "yes" without findings."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in _TITLES if verdict in verdicts), "yes")
