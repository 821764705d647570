"""What every command does around its work: arguments, errors and exit codes."""

import argparse
import os
import pathlib
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import NoReturn

from jaxsp.config import schema
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.runtime import cluster, distributed
from jaxsp.runtime.cluster import Process

EXIT_OK, EXIT_INTERNAL_ERROR, EXIT_USER_ERROR, EXIT_NEEDS_ATTENTION, EXIT_INTERRUPTED = (
    0,
    1,
    2,
    3,
    130,
)
"""Exit codes: done, an error of ours or of the machine's, the user's mistake, a run that cannot go on until somebody looks at
it, Ctrl-C. One that hangs ends with processes.AGAIN."""

_LOST_PEER = re.compile(r"Connection (reset|closed) by peer|Broken pipe|remote process exit")
"""Text in the errors of Gloo and NCCL when another process is gone. The traceback shows only which
computation ran, so it is printed with --verbose."""


class _Parser(argparse.ArgumentParser):
    """A parser that answers `--lr 1e-5` with the field of the config."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the problem, and exits with 2."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        options = [word.partition("=")[0] for word in unknown.split() if word.startswith("--")]
        examples = dict.fromkeys(filter(None, map(schema.suggest_override, options)))
        if examples:
            message += "\nFields of the config are written without dashes, for example "
            message += " ".join(examples)
        super().error(message)


def make_parser(
    command: str,
    description: str,
    *,
    documents_fields: bool = False,
    is_multi_process: bool = False,
) -> argparse.ArgumentParser:
    """A parser for `python -m jaxsp.VERB`.

    Args:
        fields: --help documents every field of the config.
        several: the command can be one of several processes, which `process` finds out.
    """
    made = _Parser(
        prog=f"python -m jaxsp.{command}",
        description=description,
        epilog=f"fields of CONFIG.yaml:\n\n{schema.describe_fields()}"
        if documents_fields
        else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if is_multi_process:
        group = made.add_argument_group(
            "one of several processes",
            "python -m jaxsp.launch starts them, and so do torchrun, srun and Open MPI's mpirun; with none of these, say it:",
        )
        group.add_argument(
            "--coordinator", metavar="HOST:PORT", help="where process 0 listens, the same for all"
        )
        group.add_argument("--num-processes", metavar="N", type=int)
        group.add_argument(
            "--process-id",
            metavar="I",
            type=int,
            help="from 0 to N - 1; it uses all GPUs that it sees",
        )
    return made


def detect_process(args: argparse.Namespace) -> Process:
    """Which of several processes this is, by the arguments of a parser for `several`, or by what started it."""
    return cluster.detect_process(
        os.environ,
        coordinator=args.coordinator,
        num_processes=args.num_processes,
        process_index=args.process_id,
    )


def check_file(file: pathlib.Path, *, flag: str) -> None:
    """Raises: UserError where no such file can be made, before there is anything to write to it."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{flag} = {file}: there is no folder {folder}. Make it, or name another.")
    if file.is_dir():
        raise UserError(f"{flag} = {file}: is a folder. Name a file in it.")


def run_command(main: Callable[[list[str]], None]) -> None:
    """Runs a command and ends the process with its exit code; a user's mistake is a line, never a traceback.

    One of several processes ends them all when it fails, and says which it is; process 0 says no more than a process alone.
    """
    code, words = EXIT_OK, ""
    try:
        main(sys.argv[1:])
        distributed.shutdown()
    except UserError as error:
        code, words = EXIT_USER_ERROR, "\n".join(error.problems)
    except NeedsAttentionError as error:
        code, words = EXIT_NEEDS_ATTENTION, str(error)
    except KeyboardInterrupt as error:
        code, words = EXIT_INTERRUPTED, str(error) or "interrupted"
    except Exception as error:  # whatever else it is, it is ours: say everything
        code, words = EXIT_INTERNAL_ERROR, traceback.format_exc().rstrip()
        if (
            distributed.this_process().num_processes > 1
            and _LOST_PEER.search(str(error))
            and "--verbose" not in sys.argv
        ):
            reason = str(error).splitlines()[0]
            words = (
                f"cannot reach another process of this run, which may have been killed: {reason}"
            )
        if (first := distributed.find_failed_peer()) is not None:
            # what was sent to that one came to nothing: a consequence, which would hide the cause
            code, words = (
                first[1],
                f"ends because process {first[0]} has failed, with exit code {first[1]}",
            )
    here = distributed.this_process()
    if words:
        with distributed.ignore_broken_pipe():
            print(
                textwrap.indent(
                    words, distributed.line_prefix(here.index), lambda _: here.index > 0
                ),
                file=sys.stderr,
                flush=True,
            )
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would try again as it ends, and end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code != EXIT_OK and here.num_processes > 1:
        distributed.abort_job(code)
    sys.exit(code)
