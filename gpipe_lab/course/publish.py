"""Execute notebooks in place and keep their outputs small and steady: `make course`.

Everything that changes from run to run without meaning anything (times of execution, versions, widget
state) is left out, so that a difference between two runs is a difference in the course.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from .chapters import EXECUTED, FIRST_PICTURE, LONGEST_CELL

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path, *, timeout_s: int = 600) -> float:
    """Run one notebook, write it back with its outputs, and return the seconds it took.

    Raises, and writes nothing, if a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name=KERNEL["name"],
        record_timing=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    began = time.monotonic()
    client.execute()
    executed_s = time.monotonic() - began
    times = cell_times(notebook)
    clean(notebook)
    notebook.metadata[EXECUTED] = round(executed_s)
    notebook.metadata[LONGEST_CELL] = round(max(end - start for start, end, _ in times), 1)
    drawn = [end for _, end, draws in times if draws]
    if drawn:
        notebook.metadata[FIRST_PICTURE] = round(drawn[0] - times[0][0], 1)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return executed_s


def cell_times(notebook: Any) -> list[tuple[float, float, bool]]:
    """When each executed cell started and ended, in seconds of the same clock, and whether it drew."""
    times = []
    for cell in notebook.cells:
        moments = cell.metadata.get("execution", {})
        if moments:
            start = datetime.fromisoformat(moments["iopub.execute_input"]).timestamp()
            end = datetime.fromisoformat(moments["shell.execute_reply"]).timestamp()
            draws = any("image/png" in output.get("data", {}) for output in cell.outputs)
            times.append((start, end, draws))
    return times


def clean(notebook: Any) -> None:
    """Take out of an executed notebook what is not worth keeping."""
    notebook.metadata = type(notebook.metadata)(kernelspec=KERNEL, language_info={"name": "python"})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # A widget without its state is a line of text that says nothing; its static twin stays.
            cell.outputs = joined([out for out in cell.outputs if WIDGET_VIEW not in out.get("data", {})])


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs with neighbouring pieces of one stream in one piece.

    A kernel cuts a stream wherever its clock says so. What is printed between two tables stays between them.
    """
    found: list[Any] = []
    for output in outputs:
        is_more = found and output["output_type"] == found[-1]["output_type"] == "stream"
        if is_more and output["name"] == found[-1]["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


def main(paths: list[str]) -> None:
    os.environ["GPIPE_LAB_HEADLESS"] = "1"
    for path in map(Path, paths):
        print(f"{path}: {execute(path):.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
