"""The README keeps its word: its links lead somewhere and its commands exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

from gpipe_lab.course.grade import CRASHED, MISSING, SYNTAX, TIMED_OUT, UNREADABLE
from gpipe_lab.course.grading import FAILED, NOT_DONE, PASSED
from gpipe_lab.tools.record import LONGER, markdown, read

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_link_leads_to_a_file():
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", TEXT)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_make_target_exists():
    targets = set(re.findall(r"^make (\w+)", TEXT, re.MULTILINE))
    assert {"lab", "test"} <= targets
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_every_chapter_is_listed():
    chapters = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert chapters == set(re.findall(r"\]\((notebooks/[^)]+\.ipynb)\)", TEXT))


def test_every_row_of_the_measured_table_is_the_records():
    record = markdown(read(ROOT / "data" / "runs" / "bench_cpu.csv")).splitlines()
    assert record[0] in TEXT
    table = TEXT[TEXT.index(record[0]) :].split("\n\n")[0].splitlines()
    assert len(table) > 20 and [row for row in table if row not in record] == []


def test_the_record_has_torch_take_longer_in_every_row():
    ratios = [f for f in read(ROOT / "data" / "runs" / "bench_cpu.csv") if f.engine == LONGER]
    assert len(ratios) == 21 and [f.what for f in ratios if f.value <= 1] == []


def test_no_placeholder_is_left():
    assert "<!--" not in TEXT


def test_the_container_installs_what_the_course_needs():
    for path in (ROOT / ".devcontainer").rglob("devcontainer.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        assert "requirements.txt" in config["postCreateCommand"], path
        assert any(argument.startswith("--shm-size") for argument in config["runArgs"]), path
        assert config["hostRequirements"].get("gpu", False) == (path.parent.name == "gpu"), path


def test_the_grading_command_is_as_the_instructors_page_says():
    page = (ROOT / "notebooks" / "instructor.md").read_text(encoding="utf-8")
    command = re.search(r"^python -m (\S+) handed_in (.*)$", page, re.MULTILINE)
    assert command is not None
    said = subprocess.run(
        [sys.executable, "-m", command[1], "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for option in re.findall(r"-+[a-z]+", command[2]):
        assert option in said.stdout
    verdicts = set(re.findall(r"^\| ([a-z ]+) \|", page, re.MULTILINE)) - {"verdict"}
    assert verdicts == {PASSED, FAILED, NOT_DONE, TIMED_OUT, CRASHED, SYNTAX, UNREADABLE, MISSING}
