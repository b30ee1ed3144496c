"""The package as others install it: a wheel, in a folder of its own, without the repository beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import gpipe_lab as gl
assert gl.__file__.startswith(sys.argv[1]), gl.__file__
assert "llama3-70b" in gl.MODELS and "h100" in gl.DEVICES
assert len(gl.published().frame()) > 20
gl.glossary("bubble")
print(gl.report.__name__)
with gl.Lab(2, device="cpu") as lab:
    assert lab.launch(lambda context: context.rank) == [0, 1]
try:
    print(len(gl.progress().chapters))
except gl.InputError as error:
    print(error)
"""


def test_every_folder_of_the_package_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in ROOT.glob("gpipe_lab/**/*.py")}
    assert listed == there | {"gpipe_lab.data"}


@pytest.mark.slow
def test_a_wheel_works_from_another_folder(tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path]
    copy = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "build", "site"))
    subprocess.run([*pip, copy], check=True, capture_output=True)
    installed = tmp_path / "with a space, 中文"
    with zipfile.ZipFile(*tmp_path.glob("*.whl")) as wheel:
        wheel.extractall(installed)
    work = tmp_path / "work"
    work.mkdir()

    def told() -> str:
        command = [sys.executable, "-c", PROGRAM, str(installed)]
        environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "the chapters lie in notebooks/" in told()
    shutil.copytree(ROOT / "notebooks", work / "notebooks")
    assert told().split()[-1] == str(len(list(ROOT.glob("notebooks/*.ipynb"))))
