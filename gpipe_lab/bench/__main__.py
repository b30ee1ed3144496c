"""`python -m gpipe_lab.bench`: what the engine costs, beside torch's own pipelining in the same run.

Prints a table and, with `--out FILE.csv`, writes it with its origin. Absolute times depend on the machine;
ratios within one run are what counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .measure import measure
from .record import markdown, origin, read, write


def picture() -> bytes:
    """A measured, paced run of GPipe at P=4, M=8, with what each rank held beneath it; a PNG."""
    import gpipe_lab as gl

    inputs, targets = gl.tiny_batch(32)
    pace = gl.Pace(forward_ms=15, backward_ms=30)
    with gl.Lab(4) as lab:
        run = lab.run(
            gl.gpipe(4, 8), gl.tiny_gpt(), inputs, targets, loss_fn=gl.next_token_loss, pace=pace, repeats=5
        )
    return gl.plot_trace(run.trace, run.memory).png()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpipe_lab.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table as CSV, its origin in the first line")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--table", type=Path, help="print such a CSV for a page, and measure nothing")
    only.add_argument("--picture", type=Path, help="draw one paced run of GPipe as PNG, and measure nothing")
    args = parser.parse_args()
    if args.picture:
        args.picture.write_bytes(picture())
        return
    if args.table:
        print(markdown(read(args.table)))
        return
    print(origin(), flush=True)
    figures = []
    for found in measure(args.repeats):
        figures.append(found)
        print(
            f"{found.what:<75} {found.engine:<23} {found.value:8.3f} {found.unit:<5} "
            f"[{found.least:.3f}, {found.most:.3f}]",
            flush=True,
        )
    if args.out:
        write(figures, args.out)


if __name__ == "__main__":
    main()
