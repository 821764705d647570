"""jaxsp.train with a fault in one process after one step.

`python -m tests.faults.faulty WHAT:STEP:PROCESS:MARKER ...`. WHAT is `raise`, `hang`, or `slow`
(0.25 s more in each step of all processes). MARKER is a file that is created at the fault; if it
exists, there is no fault.
"""

import pathlib
import sys
import time
from typing import Any

from jaxsp import cli, train
from jaxsp.run.step_log import StepLog
from jaxsp.system import distributed

SLOW_S = 0.25


def main() -> None:
    what, step, process, marker_name = sys.argv[1].split(":")
    arguments = sys.argv[2:]
    sys.argv[1:] = arguments[2:] if arguments[0] == "-m" else arguments
    marker = pathlib.Path(marker_name)
    record_dispatched_step = StepLog.record_dispatched_step

    def record_with_fault(self: StepLog, **options: Any) -> None:
        was_running = self._previous_step is not None
        record_dispatched_step(self, **options)
        if was_running:
            time.sleep(SLOW_S)
        is_due = (
            what != "slow"
            and self._num_finished == int(step)
            and distributed.this_process.index == int(process)
            and not marker.exists()
        )
        if not is_due:
            return
        marker.touch()
        if what == "raise":
            raise ZeroDivisionError("requested by the test")
        time.sleep(1000)

    StepLog.record_dispatched_step = record_with_fault
    cli.run_command(train.main)


if __name__ == "__main__":
    main()
