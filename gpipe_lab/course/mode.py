"""Where the course runs: a live notebook, a headless run, or plain Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

STARTED_IN = Path.cwd()  # a kernel starts beside its notebook; its cells may go elsewhere


def headless() -> bool:
    """Whether nobody is there to type: under pytest (nbmake sets its variable), or when told so."""
    return "PYTEST_CURRENT_TEST" in os.environ or os.environ.get("GPIPE_LAB_HEADLESS", "0") not in ("", "0")


def shell() -> Any | None:
    """IPython's shell where there is one; asking does not import IPython."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def kernel() -> Any | None:
    """The notebook's kernel where there is one."""
    return getattr(shell(), "kernel", None)


def live() -> bool:
    """Whether a learner sits at a notebook that can show widgets."""
    return kernel() is not None and not headless()
