"""Imported by the forkserver, once, before it makes any worker: each worker inherits torch ready to use."""

from __future__ import annotations

import atexit
import os
import shutil
import warnings

from .forkserver import SCRATCH_VARIABLE
from .processes import adopt_orphans, kill_descendants


def _clean_up(scratch: str, owner: int) -> None:
    if os.getpid() == owner:
        kill_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)  # to take down torch's modules one by one takes half a second of computation


def _outlive_the_driver_to_clean_up(scratch: str) -> None:
    """The forkserver ends after the driver and all workers, so it removes what a killed driver leaves.

    A session of its own keeps it, and every worker, out of reach of a signal to the driver's group. It
    inherits what workers that were killed had started.
    """
    os.setsid()
    adopt_orphans()
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
    atexit.register(_clean_up, scratch, os.getpid())
    # Importing dynamo makes a cache folder; workers take on the driver's environment and so its own choice.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(scratch, "inductor")


if SCRATCH_VARIABLE in os.environ:
    _outlive_the_driver_to_clean_up(os.environ.pop(SCRATCH_VARIABLE))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # what the first optimizer would import, in every worker apart
import torch.distributed  # noqa: E402
import torch.fx.experimental.symbolic_shapes  # noqa: E402, F401  # and the first backward

from . import worker  # noqa: E402, F401
