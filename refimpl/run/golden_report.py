"""Reports of the golden gate as files: JSON, JUnit XML, and one HTML page that needs no network.

Must not know: how cases run, what verdicts mean. Called by: the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from refimpl.config import ConfigError, require
from refimpl.run.golden import Finding, replace_file
from refimpl.run.golden_show import figure_table, for_json, summary

_TEMPLATE: Final = "golden_report.html.jinja"
_NOT_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SUITE: Final = "refimpl golden"


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Where reports go; None: not asked for. Raises ConfigError for what can't be written."""

    json: Path | None = None
    junit: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        named = {"--report-json": self.json, "--junit": self.junit, "--html": self.html}
        for flag, path in named.items():
            if path is not None:
                require(path.parent.is_dir(), f"{flag} {path}: there is no folder {path.parent}")
                require(not path.is_dir(), f"{flag} {path} is a folder")
        if self.html is not None:
            check_html()

    def write(self, findings: Sequence[Finding]) -> None:
        """Write what was asked for. Raises ConfigError for a file that can't be written."""
        texts = {self.json: as_json, self.junit: as_junit, self.html: as_html}
        for path, text in texts.items():
            if path is None:
                continue
            try:
                replace_file(path, text(findings))
            except OSError as error:
                raise ConfigError(f"{path} can't be written: {error}") from None


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as one JSON object, the one that ``--json`` prints."""
    return json.dumps(for_json(list(findings)), indent=2, sort_keys=True) + "\n"


# ---- JUnit XML ----------------------------------------------------------------------------------


def as_junit(findings: Sequence[Finding]) -> str:
    """One suite, a test case a golden case. What failed has its figures as the text of its failure."""
    failed = [finding for finding in findings if finding.is_failure]
    counts = {"tests": str(len(findings)), "failures": str(len(failed)), "errors": "0"}
    seconds = f"{sum(finding.seconds for finding in findings):.3f}"
    root = ElementTree.Element("testsuites", {"name": _SUITE, **counts, "time": seconds})
    about = {"name": _SUITE, **counts, "skipped": "0", "time": seconds}
    suite = ElementTree.SubElement(root, "testsuite", about)
    for finding in findings:
        _add_test_case(suite, finding)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_test_case(suite: ElementTree.Element, finding: Finding) -> None:
    about = {"classname": "golden", "name": finding.case, "time": f"{finding.seconds:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", about)
    words = _words(finding)
    if finding.is_failure:
        message = _clean(f"{finding.case}: {finding.verdict}")
        failure = ElementTree.SubElement(
            case, "failure", {"type": finding.verdict, "message": message}
        )
        failure.text = words
    elif words:
        ElementTree.SubElement(case, "system-out").text = words


def _words(finding: Finding) -> str:
    header, rows = figure_table(finding.changes)
    lines = list(finding.problems)
    for path, *cells in rows:
        said = [f"{name} {cell}" for name, cell in zip(header[1:], cells, strict=True) if cell]
        lines.append(f"{path}: {', '.join(said)}")
    return _clean("\n".join(lines))


def _clean(text: str) -> str:
    """Without the characters that XML can't hold, such as what an error of a broken server carries."""
    return _NOT_XML.sub("\ufffd", text)


# ---- HTML ---------------------------------------------------------------------------------------


def check_html() -> None:
    """Raise ConfigError, with what to install, unless the page can be made."""
    try:
        import jinja2
        import plotly
    except ImportError as error:
        raise ConfigError(f"--html needs {error.name}: pip install -e '.[report]'") from None
    del jinja2, plotly


def as_html(findings: Sequence[Finding]) -> str:
    """The page: verdicts, figures, and plots that are drawn when a case is opened."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    from refimpl.run.golden_plots import figure_json

    page = Environment(
        loader=PackageLoader("refimpl.run", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(_TEMPLATE)
    plots = {each.case: figure_json(each.picture) for each in findings if each.picture is not None}
    text = page.render(
        summary=summary(list(findings)),
        findings=findings,
        table=figure_table,
        plots=plots,
        plotly_js=get_plotlyjs() if plots else "",
    )
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair can't be written
