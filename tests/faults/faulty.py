"""python -m tests.faults.faulty WHAT:STEP:PROCESS:ONCE ... : jaxsp.train, where something befalls a process after a step.

WHAT is `raise`, `hang`, or `slow` (every step, 0.25 s more, in all processes); ONCE is a file, beside
which it does not happen again.
"""

import pathlib
import sys
import time

from jaxsp import cli, train
from jaxsp.reporting.step_log import StepLog
from jaxsp.runtime import distributed

SLOW_S = 0.25


def main() -> None:
    (what, step, process, once), arguments = sys.argv[1].split(":"), sys.argv[2:]
    sys.argv[1:] = arguments[2:] if arguments[0] == "-m" else arguments
    catch_up, marker = StepLog.record_previous_step, pathlib.Path(once)

    def faulty(self: StepLog) -> None:
        was_running = self._previous_step is not None
        catch_up(self)
        if was_running:
            time.sleep(SLOW_S)
        if (
            what == "slow"
            or self._num_finished != int(step)
            or distributed.this_process().index != int(process)
            or marker.exists()
        ):
            return
        marker.touch()
        if what == "raise":
            raise ZeroDivisionError("as the test asked for")
        time.sleep(1000)

    StepLog.record_previous_step = faulty
    cli.run_command(train.main)


if __name__ == "__main__":
    main()
