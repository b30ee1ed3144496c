"""For a machine with a GPU: `python -m tests.gpu.run [--out FILE.json]` runs every check and prints a table.

Needs torch and the package's own requirements, no pytest and no Jupyter; takes a few minutes on one GPU.
"""

import argparse
import json
import time
import traceback
from pathlib import Path

import torch

from gpipe_lab.tools.record import origin

from .checks import CHECKS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU that torch can see: nothing to check")
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    record = {"origin": origin(), "cards": cards, "checks": []}
    print(record["origin"], cards, sep="\n", flush=True)
    for check in CHECKS:
        start = time.monotonic()
        try:
            verdict, figures = "passed", check()
        except Exception:  # the others are still worth their time; the failure is shown and counted
            verdict, figures = "FAILED", {"traceback": traceback.format_exc()}
        took = time.monotonic() - start
        record["checks"].append({"check": check.__name__, "verdict": verdict, "seconds": took, **figures})
        print(f"{verdict:<7} {took:6.1f} s  {check.__name__}: {figures}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1, default=str))
    failed = sum(c["verdict"] == "FAILED" for c in record["checks"])
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
