"""pip's settings as options of uv, which does not read them: where to look for packages, which to hold back.

Run by the Python whose pip is meant. What the environment says goes before what is said for `pip install`,
and that before what is said for all of pip.
"""

from __future__ import annotations

import ast
import subprocess
import sys

SECTIONS = ("global", "install", ":env:")  # later ones first
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
}


def uv_options(listed: str) -> list[str]:
    """The options for what `pip config list` has printed: lines such as `global.find-links='/wheels'`."""
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in listed.splitlines()]
    for section in SECTIONS:
        found |= {
            name[len(section) + 1 :]: value for name, _, value in lines if name.startswith(f"{section}.")
        }
    options = [
        f"{option}={value}"
        for name, option in OPTIONS.items()
        for value in ast.literal_eval(found.get(name, "''")).split()
    ]
    return [
        *options,
        "--index-strategy=unsafe-best-match",
    ]  # the newest of all that are offered, as pip has it


if __name__ == "__main__":
    command = [sys.executable, "-m", "pip", "config", "list"]
    print(*uv_options(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
