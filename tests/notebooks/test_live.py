"""The same watch in a live notebook, where somebody is waiting and cells go on after an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

DOCTOR = "import gpipe_lab as gl\n\ngl.doctor()"


def run_live(folder: Path, monkeypatch: pytest.MonkeyPatch, *cells: Any) -> list[list[dict]]:
    """Outputs of each cell, in a kernel that does not know that it is tested. Errors stop nothing."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    code = [nbformat.v4.new_code_cell(source) for source in (DOCTOR, *cells)]
    for cell in code:
        if cell.source.startswith("# tagged"):
            cell.metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=code)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=60, allow_errors=True, resources=resources).execute()
    return [cell.outputs for cell in notebook.cells[1:]]


def errors(outputs: list[dict]) -> list[str]:
    return [output["ename"] for output in outputs if output["output_type"] == "error"]


def test_a_late_failure_reaches_the_next_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), 1 / 0)).start()"
    first, second, third = run_live(tmp_path, monkeypatch, late, "time.sleep(0.5)", "1")
    assert errors(first) == []
    assert errors(second) == ["ZeroDivisionError"]
    assert errors(third) == []


def test_a_prediction_is_a_box_and_a_pass_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "def f(minutes, num_loads):\n    return sum(minutes) + (num_loads - 1) * max(minutes)\n"
    box, checked = run_live(
        tmp_path,
        monkeypatch,
        'guess = gl.predict("live", "How long?", 3.0, "min")',
        answer + 'assert gl.check("00-finish-time", f)',
    )
    assert any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in box)
    assert errors(checked) == []
    kept = json.loads((tmp_path / ".gpipe_lab_progress.json").read_text(encoding="utf-8"))
    assert list(kept["passed"]) == ["00-finish-time"]


def test_failures_are_shown_with_the_line_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outputs,) = run_live(
        tmp_path,
        monkeypatch,
        "import threading\n\ndef divide():\n    return 1 / 0\n\n"
        "thread = threading.Thread(target=divide, name='divider')\nthread.start()\nthread.join()",
    )
    (error,) = [output for output in outputs if output["output_type"] == "error"]
    shown = "\n".join(error["traceback"])
    assert "divide" in shown
    assert "in thread 'divider', started by a cell" in shown
    assert [output for output in outputs if output.get("name") == "stderr"] == []
