"""Malformed and hostile input: each is accepted, or refused by a UserError, in limited time.

`python -m tests.faults.fuzz --seed 0 configs=5000 models=2500 data=500 tokenizers=100 templates=50`
prints a table by kind of input, and exits with 1 after a traceback or a hang.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import json
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
from jaxsp.data.chat import chat_template
from jaxsp.data.tokenization import tokenizers
from tests.faults.fuzz_inputs import KINDS

ACCEPTED = "accepted"
REFUSED = "refused"
TRACEBACK = "traceback"
HUNG = "hung"
OUTCOMES = (ACCEPTED, REFUSED, TRACEBACK, HUNG)

_HANG_S = 60
"""CPU time of a case; the limits of templates and tokenizers are lowered to a second."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case with a wrong outcome."""

    seed: str
    outcome: str
    reason: str


_ENDS_PROCESS = ("templates", "tokenizers")
"""Kinds whose limits end the process: each case runs in a process of its own."""


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


def run_forked(kind: str, seed: str) -> Failure | str:
    """Runs a case in a process of its own, which may end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(2 * _HANG_S, exit=True)
        result = run_case(kind, seed)
        text = result if isinstance(result, str) else json.dumps(dataclasses.astuple(result))
        os.write(writer, text.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 2:
        return REFUSED
    if code != 0:
        return Failure(seed, HUNG if code == 1 else TRACEBACK, f"exit code {code}")
    return text if text in OUTCOMES else Failure(*json.loads(text))


@contextlib.contextmanager
def prepared(folder: pathlib.Path) -> Iterator[None]:
    """Runs cases in a folder, with low limits."""
    old = os.getcwd()
    limits = {chat_template: 1.0, tokenizers: 3.0}
    seconds = {module: module._SECONDS for module in limits}
    memory = tokenizers._MEMORY
    cache = datasets.config.HF_DATASETS_CACHE
    os.chdir(folder)
    for module, value in limits.items():
        module._SECONDS = value
    tokenizers._MEMORY = 2**30
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    try:
        yield
    finally:
        os.chdir(old)
        for module, value in seconds.items():
            module._SECONDS = value
        tokenizers._MEMORY = memory
        datasets.config.HF_DATASETS_CACHE = cache


def run_cases(kind: str, number: int, *, seed: int) -> tuple[dict[str, int], list[Failure]]:
    """Runs cases of a kind in the current folder. Returns: the number of each outcome."""
    counts: dict[str, int] = collections.Counter()
    failures = []
    run = run_forked if kind in _ENDS_PROCESS else run_case
    for index in range(number):
        result = run(kind, f"{kind}-{seed}-{index}")
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
