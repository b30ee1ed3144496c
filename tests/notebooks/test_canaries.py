"""Green must mean passing: notebooks that must fail, run the way chapters are, are each seen to fail."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "canaries"

# What the report of each must name.
CANARIES = {
    "interact": "ZeroDivisionError",
    "output": "ZeroDivisionError",
    "button": "ZeroDivisionError",
    "thread": "ZeroDivisionError",
    "thread_left_alone": "ZeroDivisionError",
    "task": "ZeroDivisionError",
    "task_dropped": "ZeroDivisionError",
    "shell": "CalledProcessError",
    "shell_output": "CalledProcessError",
    "process": "died with exit code 1",
    "process_killed": "died with exit code -9",
    "nothing_raised": "nothing was raised",
    "nothing_raised_last": "the last code cell is tagged raises-exception",
    "unwatched": "the first code cell calls gl.doctor()",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Notebook -> what pytest reported about it, "" for a pass."""
    xml = tmp_path_factory.mktemp("canaries") / "report.xml"
    notebooks = sorted(str(path.relative_to(ROOT)) for path in FOLDER.glob("*.ipynb"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbmake",
        "--nbmake-timeout=60",
        f"--junitxml={xml}",
        *notebooks,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert xml.exists(), done.stdout + done.stderr
    found = {}
    for case in ET.parse(xml).iter("testcase"):
        problem = next((e for e in case if e.tag in ("failure", "error")), None)
        said = "" if problem is None else f"{problem.get('message')}\n{problem.text}"
        found[Path(case.attrib["name"]).stem] = said
    return found


def test_every_canary_is_expected(reports: dict[str, str]) -> None:
    assert set(reports) == {*CANARIES, "control"}


@pytest.mark.parametrize("name", CANARIES)
def test_canary_fails(name: str, reports: dict[str, str]) -> None:
    assert CANARIES[name] in reports[name]
    assert "INTERNAL ERROR" not in reports[name]


@pytest.mark.parametrize("name", [n for n in CANARIES if n not in ("nothing_raised",)])
def test_the_failure_is_at_its_own_cell(name: str, reports: dict[str, str]) -> None:
    assert "the cell after it" not in reports[name]


def test_the_control_passes(reports: dict[str, str]) -> None:
    assert reports["control"] == ""
