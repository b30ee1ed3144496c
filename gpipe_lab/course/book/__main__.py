"""python -m gpipe_lab.course.book [-o site]: render the executed chapters to a folder of HTML pages."""

from __future__ import annotations

import argparse
from pathlib import Path

from .site import write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpipe_lab.course.book", description=__doc__)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("site"), help="folder to write (default: site)"
    )
    folder = parser.parse_args().out
    written = write(folder)
    print(f"{len(written)} pages; open {folder / 'index.html'}")


if __name__ == "__main__":
    main()
