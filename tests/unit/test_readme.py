"""The README keeps its word: its links lead somewhere and its commands exist."""

import re
import subprocess
from pathlib import Path

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
    assert chapters == set(re.findall(r"\]\((notebooks/[^)]+)\)", TEXT))


def test_no_placeholder_is_left():
    assert "<!--" not in TEXT
