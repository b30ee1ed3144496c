"""Ways for a rank to fail, each as it happens to real ones."""

import os
import signal
import time

TOLD = {"exception": "a fault on purpose", "exit": "exit code 3", "kill": "SIGKILL", "hang": "hangs"}


def fail(fault):
    """Fail here and now: what the driver then says has TOLD[fault] in it."""
    match fault:
        case "exception":
            raise ValueError("a fault on purpose")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
