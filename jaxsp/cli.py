"""What every command does around its work: arguments, errors and exit codes."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxsp.core import config, errors

DONE, OURS, MISTAKE = 0, 1, 2
"""Exit codes: done, an error of jaxsp or of the run, the user's mistake."""


def parser(verb: str, about: str, *, fields: bool = False) -> argparse.ArgumentParser:
    """A parser for `python -m jaxsp.VERB`; with `fields`, --help documents every field of the config."""
    return argparse.ArgumentParser(
        prog=f"python -m jaxsp.{verb}",
        description=about,
        epilog=f"fields of CONFIG.yaml:\n\n{config.describe()}" if fields else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(main: Callable[[list[str]], None]) -> None:
    """Runs a command and ends the process with its exit code; a user's mistake is a line, never a traceback."""
    # transformers says on import that PyTorch was not found; nothing here needs it
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        main(sys.argv[1:])
        code = DONE
    except errors.UserError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        code = MISTAKE
    except errors.Stopped as error:
        print(error, file=sys.stderr)
        code = OURS
    except KeyboardInterrupt:
        print("interrupted; a run saves its weights at its end only", file=sys.stderr)
        code = 130
    except Exception:  # whatever else it is, it is ours: say everything
        traceback.print_exc()
        code = OURS
    sys.exit(code)


class Problems(list[str]):
    """Collects what is wrong in several places, to say it all at once."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Takes the problems of a UserError raised in the block, and goes on after it."""
        try:
            yield
        except errors.UserError as error:
            self += error.problems

    def check(self) -> None:
        """Raises: UserError if there is any problem."""
        if self:
            raise errors.UserError(dict.fromkeys(self))
