"""One JupyterLab and one headless Chromium for all tests, on a notebook that holds a panel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_S = 90
WIDTH, HEIGHT = 1280, 800
SCREENSHOTS = os.environ.get("GPIPE_LAB_SCREENSHOTS")  # a folder to keep what the tests saw

# JupyterLab's own: it asks for resources that a bare server does not have.
TOLERATED = ("favicon", "/api/me", "/lab/api/news", "/lab/api/update")

CELLS = (
    "import dataclasses\n\nimport gpipe_lab as gl",
    "def mine(num_stages, num_microbatches):\n"
    "    schedule = gl.one_f_one_b(num_stages, num_microbatches)\n"
    '    return dataclasses.replace(schedule, name="mine")\n\n\n'
    "ex = gl.explore(3, 4, own=mine, forward_ms=5)\n"
    "ex",
)


@dataclass
class Lab:
    """The server, the page, and what the page complained of."""

    server: subprocess.Popen
    page: Any
    problems: list[str] = field(default_factory=list)

    def command(self, name: str, **args: Any) -> None:
        """Give one of JupyterLab's own commands; what it leads to is waited for by what it shows."""
        self.page.evaluate("([name, args]) => void jupyterapp.commands.execute(name, args)", [name, args])

    def processes(self) -> list[psutil.Process]:
        """Everything the server started: the kernel, its workers, what they start from."""
        return psutil.Process(self.server.pid).children(recursive=True)

    def screenshot(self, name: str) -> None:
        """What a learner sees, and all of it."""
        if not SCREENSHOTS:
            return
        for end, height in (("", HEIGHT), ("_whole", 4 * HEIGHT)):
            self.page.set_viewport_size({"width": WIDTH, "height": height})
            self.page.screenshot(path=str(Path(SCREENSHOTS) / f"{name}{end}.png"))
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


def until(condition: Callable[[], Any], what: str, *, seconds: float = START_S) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"not within {seconds} s: {what}")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    nbformat = pytest.importorskip("nbformat")
    missing = "playwright is missing: pip install -r tests/browser/requirements.txt"
    playwright = pytest.importorskip("playwright.sync_api", reason=missing)
    if CHROMIUM is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    folder = tmp_path_factory.mktemp("lab")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # else JupyterLab asks which
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "panel.ipynb")
    server, address = _server(folder)
    try:
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.set_default_timeout(1000 * START_S)
            started = Lab(server, page)
            page.on("console", lambda said: _note(started.problems, said))
            page.on("pageerror", lambda error: started.problems.append(f"uncaught: {error}"))
            page.goto(address)
            page.wait_for_selector(".jp-Notebook .jp-Cell")
            page.wait_for_function("window.jupyterapp !== undefined")
            page.get_by_text(re.compile(r"Python 3.* \| Idle")).first.wait_for()  # before that, Run would ask
            started.command("application:toggle-left-area")
            started.command("notebook:run-all-cells")
            page.wait_for_selector("img[alt*='P = 3, M = 4']")
            yield started
            browser.close()
    finally:
        _end(server)


def _note(problems: list[str], said: Any) -> None:
    text = f"{said.text} {said.location.get('url', '')}"
    if said.type == "error" and not any(known in text for known in TOLERATED):
        problems.append(text)


def _server(folder: Path) -> tuple[subprocess.Popen, str]:
    """A JupyterLab of its own, apart from the settings of whoever runs the tests; and its address."""
    places = {
        name: str(folder / "jupyter" / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    }
    places["JUPYTERLAB_SETTINGS_DIR"] = places["JUPYTERLAB_WORKSPACES_DIR"] = places["JUPYTER_CONFIG_DIR"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} | places
    notifications = Path(places["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab", "apputils-extension")
    notifications.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (notifications / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    flags = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1", "--port=0"]
    log = (folder / "server.log").open("w")
    command = [sys.executable, "-m", "jupyterlab", *flags, f"--ServerApp.root_dir={folder}"]
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)

    def running() -> dict | None:
        if server.poll() is not None:
            pytest.fail((folder / "server.log").read_text())
        found = list(Path(places["JUPYTER_RUNTIME_DIR"]).glob("jpserver-*.json"))
        return json.loads(found[0].read_text() or "null") if found else None

    info = until(running, "JupyterLab starts")
    return server, f"{info['url']}lab/tree/panel.ipynb?token={info['token']}"


def _end(server: subprocess.Popen) -> None:
    """The server and all it started, by their own numbers."""
    left = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    server.terminate()
    _, alive = psutil.wait_procs(left, timeout=10)
    for process in alive:
        process.kill()
