"""What every notebook that pytest runs must have, so that its failures cannot pass unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.hookimpl
def pytest_runtest_setup(item: pytest.Item) -> None:
    if getattr(item, "nbmake", False):
        for problem in blind_spots(Path(item.path)):
            pytest.fail(problem, pytrace=False)


def blind_spots(notebook: Path) -> list[str]:
    """Why its failures could go unseen: nothing watches its cells, or nothing follows the last one."""
    cells = [c for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    if not cells or "gl.doctor(" not in "".join(cells[0]["source"]):
        return [f"{notebook.name}: the first code cell calls gl.doctor(), which makes hidden failures count"]
    if "raises-exception" in cells[-1]["metadata"].get("tags", []):
        return [f"{notebook.name}: the last code cell is tagged raises-exception; put one after it"]
    return []
