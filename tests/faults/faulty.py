"""python -m tests.faults.faulty WHAT:STEP:PROCESS:ONCE ... : jaxsp.train, where something befalls a process after a step.

WHAT is `raise`, `hang`, or `slow` (every step, 0.25 s more, in all processes); ONCE is a file, beside
which it does not happen again.
"""

import pathlib
import sys
import time

from jaxsp import cli, train
from jaxsp.reporting import step_log
from jaxsp.runtime import distributed

SLOW_S = 0.25


def main() -> None:
    (what, step, process, once), arguments = sys.argv[1].split(":"), sys.argv[2:]
    sys.argv[1:] = arguments[2:] if arguments[0] == "-m" else arguments
    catch_up, marker = step_log.Log.catch_up, pathlib.Path(once)

    def faulty(self: step_log.Log) -> None:
        was_running = self._running is not None
        catch_up(self)
        if was_running:
            time.sleep(SLOW_S)
        if what == "slow" or self._num_steps != int(step) or distributed.here().index != int(process) or marker.exists():
            return
        marker.touch()
        if what == "raise":
            raise ZeroDivisionError("as the test asked for")
        time.sleep(1000)

    step_log.Log.catch_up = faulty
    cli.run(train.main)


if __name__ == "__main__":
    main()
