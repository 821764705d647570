"""Malformed and hostile input: each is accepted, or refused by a UserError, in limited time.

`python -m tests.faults.fuzz --seed 0 configs=5000 models=2500 data=500 tokenizers=100 templates=50`
prints a table by kind of input, and exits with 1 after a traceback or a hang.
"""

import argparse
import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator

import datasets
import rich.console

from jaxsp.core import errors
from jaxsp.core.errors import UserError
from tests.faults.fuzz_inputs import KINDS

ACCEPTED = "accepted"
REFUSED = "refused"
TRACEBACK = "traceback"
HUNG = "hung"
OUTCOMES = (ACCEPTED, REFUSED, TRACEBACK, HUNG)

_HANG_S = 60
"""CPU time of a case."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case with a wrong outcome."""

    seed: str
    outcome: str
    reason: str


class _HungError(BaseException):
    pass


def run_case(kind: str, seed: str) -> Failure | str:
    """Runs a case. Returns its outcome, or what is wrong."""

    def stop(*_: object) -> None:
        raise _HungError

    old_handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _HANG_S)
    try:
        KINDS[kind](random.Random(seed))
    except UserError as error:
        wrong = [
            line for line in error.problems if len(line) > 10_100 or line != errors.escape(line)
        ]
        return Failure(seed, TRACEBACK, ascii(wrong[0])) if wrong else REFUSED
    except _HungError:
        return Failure(seed, HUNG, "".join(traceback.format_exc().splitlines(True)[-6:]))
    except BaseException:
        return Failure(seed, TRACEBACK, traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old_handler)
    return ACCEPTED


@contextlib.contextmanager
def prepared(folder: pathlib.Path) -> Iterator[None]:
    """Runs cases in a folder."""
    old = os.getcwd()
    cache = datasets.config.HF_DATASETS_CACHE
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    try:
        yield
    finally:
        os.chdir(old)
        datasets.config.HF_DATASETS_CACHE = cache


def run_cases(kind: str, number: int, *, seed: int) -> tuple[dict[str, int], list[Failure]]:
    """Runs cases of a kind in the current folder. Returns: the number of each outcome."""
    counts: dict[str, int] = collections.Counter()
    failures = []
    for index in range(number):
        result = run_case(kind, f"{kind}-{seed}-{index}")
        if isinstance(result, Failure):
            failures.append(result)
            result = result.outcome
        counts[result] += 1
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("numbers", metavar="KIND=N", nargs="+", help=", ".join(KINDS))
    parser.add_argument("--case", help="runs one case, by the seed that a failure prints")
    args = parser.parse_args()
    console = rich.console.Console(highlight=False, markup=False, soft_wrap=True)
    num_failures = 0
    console.print(f"{'':<12}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES))
    for word in args.numbers:
        kind, _, number = word.partition("=")
        with tempfile.TemporaryDirectory() as folder, prepared(pathlib.Path(folder)):
            if args.case:
                console.print(str(run_case(kind, args.case)))
                continue
            counts, failures = run_cases(kind, int(number), seed=args.seed)
        console.print(f"{kind:<12}" + "".join(f"{counts[outcome]:>12}" for outcome in OUTCOMES))
        num_failures += len(failures)
        causes = {failure.reason[-300:]: failure for failure in failures}
        for failure in causes.values():
            console.print(f"{failure.seed}: {failure.outcome}\n{failure.reason}")
    sys.exit(num_failures > 0)


if __name__ == "__main__":
    main()
