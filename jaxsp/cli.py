"""Parts that all commands share: argument parser, error output and exit codes."""

import argparse
import logging
import os
import pathlib
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from jaxsp.core import errors, exit_codes, files
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.run import config_file
from jaxsp.system import cuda_plugin, distributed, standard_streams

_LOST_PEER = re.compile(r"Connection (reset|closed) by peer|Broken pipe|remote process exit")
"""Text in the errors of Gloo and NCCL when another process has ended. The traceback shows only
which computation ran, so it is printed only with --verbose."""


class _Parser(argparse.ArgumentParser):
    """Parser whose message for `--lr 1e-5` names the field of the config."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the problem, and exits with 2."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        options = [word.partition("=")[0] for word in unknown.split() if word.startswith("--")]
        examples = dict.fromkeys(filter(None, map(config_file.SCHEMA.suggest_override, options)))
        if examples:
            message += "\nSet config fields without dashes, for example " + " ".join(examples)
        super().error(message)


class _Help(argparse.Action):
    """`--help` prints the whole help, and `--help SECTION` the fields of a section."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Prints the help and exits with 0."""
        if values == self.const:
            parser.print_help()
            if values == "fields":
                print(f"\nfields of CONFIG.yaml:\n\n{config_file.SCHEMA.describe_fields()}")
        elif values in config_file.SCHEMA.sections:
            print(config_file.SCHEMA.describe_fields([values]))
        else:
            sections = errors.format_choices(config_file.SCHEMA.sections)
            parser.error(f"--help {values}: must be a section of the config: {sections}")
        parser.exit()


def make_parser(
    command: str,
    description: str,
    *,
    config_help: Literal["fields", "sections"] | None = None,
    is_multi_process: bool = False,
    verbose_help: str = "also prints the traceback of an error",
) -> argparse.ArgumentParser:
    """Makes the parser of `jaxsp COMMAND`, also started as `python -m jaxsp.COMMAND`.

    Args:
        config_help: --help documents every field of the config, or names its sections; with
            either, `--help SECTION` documents one. None: the command has no config.
        is_multi_process: the command can run in several processes; see `cluster.read_arguments`.
    """
    epilog = None
    if config_help == "sections":
        sections = config_file.SCHEMA.sections.items()
        lines = [f"  {name}: {section.__doc__}" for name, section in sections]
        epilog = "\n".join(["sections of the config:", *lines])
    parser = _Parser(
        prog=f"jaxsp {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=config_help is None,
    )
    if config_help is not None:
        parser.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            const=config_help,
            metavar="SECTION",
            help="prints this text, or the fields of a section, such as optimizer",
        )
    parser.add_argument("--verbose", action="store_true", help=verbose_help)
    if is_multi_process:
        group = parser.add_argument_group(
            "several processes",
            "The process is detected under torchrun, srun and Open MPI's mpirun. "
            "For other launchers, set:",
        )
        group.add_argument(
            "--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all"
        )
        group.add_argument("--num-processes", metavar="N", type=int, help="number of processes")
        group.add_argument(
            "--process-id",
            metavar="I",
            type=int,
            help="index of this process, from 0 to N - 1; it uses all GPUs visible to it",
        )
    return parser


def add_config_arguments(
    parser: argparse.ArgumentParser,
    name: str = "config",
    *,
    metavar: str = "CONFIG.yaml",
    help_text: str | None = None,
) -> None:
    """Adds a config, or another input, and changes of config fields."""
    parser.add_argument(name, metavar=metavar, help=help_text)
    parser.add_argument(
        "changes",
        metavar="key.path=value",
        nargs="*",
        default=[],
        help="changes a field of the config",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name of a trained or published model, and changes of config fields."""
    add_config_arguments(
        parser,
        "what",
        metavar="WHAT",
        help_text="a run's directory, a checkpoint, a Hugging Face folder or a hub name",
    )


def write_output(path: pathlib.Path, content: str) -> None:
    """Writes a file that a user named. It may be a link, or a device such as /dev/stdout."""
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.write(content)
    else:
        files.write_atomic(pathlib.Path(os.path.realpath(path)), content)


def check_file(file: pathlib.Path, *, flag: str) -> None:
    """Checks before the work that an output file can be created. Raises: UserError if not."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UserError(
            f"{flag} = {file}: the folder {folder} does not exist. Create it, or name another."
        )
    if file.is_dir():
        raise UserError(f"{flag} = {file}: is a folder. Name a file in it.")


def run_command(main: Callable[[list[str]], None]) -> None:
    """Runs a command and ends the process with its exit code.

    Invalid input is one line per problem, without a traceback unless --verbose is given. If one of
    several processes fails, it ends all of them; its lines carry its index, except for process 0.
    """
    standard_streams.protect()
    # it has a handler of its own; absl's at the root would print each retry again
    logging.getLogger("huggingface_hub").propagate = False
    code = exit_codes.OK
    try:
        main(sys.argv[1:])
        distributed.shutdown()
    except (Exception, KeyboardInterrupt) as error:
        code, message = _explain(error)
        if "--verbose" in sys.argv and message is not None:
            message = f"{traceback.format_exc()}{message}"
        message = errors.escape(message or traceback.format_exc().rstrip(), keep="\n\t")
        if (index := distributed.this_process().index) > 0:
            message = textwrap.indent(message, distributed.line_prefix(index))
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if (reason := standard_streams.find_full_disk()) is not None:
        print(f"standard output: {reason}. Some lines are lost.", file=sys.stderr, flush=True)
    if code != exit_codes.OK and distributed.this_process().num_processes > 1:
        distributed.abort_job(code)
    sys.exit(code)


def _explain(error: BaseException) -> tuple[int, str | None]:
    """Exit code and message of an error; no message for a bug, of which the traceback is needed."""
    match error:
        case UserError():
            return exit_codes.USER_ERROR, "\n".join(error.problems)
        case NeedsAttentionError():
            return exit_codes.NEEDS_ATTENTION, str(error)
        case KeyboardInterrupt():
            return exit_codes.INTERRUPTED, str(error) or "interrupted"
    failed_peer = distributed.find_failed_peer()
    if failed_peer is not None:
        # this error follows from the peer's, and its traceback would hide the cause
        index, code = failed_peer
        return code, f"ends because process {index} failed with exit code {code}"
    message = None
    if distributed.this_process().num_processes > 1 and _LOST_PEER.search(str(error)):
        reason = errors.first_line(error)
        message = f"cannot reach another process of this run, which may have been killed: {reason}"
    message = message or cuda_plugin.explain(error)
    return exit_codes.INTERNAL_ERROR, message
