"""Parts that all commands share: argument parser, error output and exit codes."""

import argparse
import logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from jaxsp.core import errors, files
from jaxsp.core.errors import ExitCode, NeedsAttentionError, UserError
from jaxsp.run import config_file
from jaxsp.system import cluster, distributed, output

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

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **_: Any) -> None:
        values = args[1]
        if values == self.const:
            parser.print_help()
            if values == "CONFIG.yaml":
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
    takes: Literal["CONFIG.yaml", "WHAT"] | None = None,
    is_multi_process: bool = False,
    verbose_help: str = "also prints the traceback of an error",
) -> argparse.ArgumentParser:
    """Makes the parser of `jaxsp COMMAND`, also started as `python -m jaxsp.COMMAND`.

    Args: takes: the command takes a config, whose fields --help documents, or a model, and changes
        of config fields. With either, `--help SECTION` documents a section.
    """
    epilog = None
    if takes == "WHAT":
        epilog = "sections of the config:"
        for name, field in config_file.Config.model_fields.items():
            epilog += f"\n  {name}: " + str(field.annotation.__doc__).partition("\n")[0]
    parser = _Parser(
        prog=f"jaxsp {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=takes is None,
    )
    add = parser.add_argument
    if takes is not None:
        text = "prints this text, or the fields of a section, such as optimizer"
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "nargs": "?", "const": takes}
        add("-h", "--help", action=_Help, metavar="SECTION", help=text, **settings)
    add("--verbose", action="store_true", help=verbose_help)
    if is_multi_process:
        group = parser.add_argument_group(
            "several processes",
            "The process is detected under torchrun, srun and Open MPI's mpirun. "
            "For other launchers, set:",
        )
        text = "address of process 0, the same for all"
        group.add_argument("--coordinator", metavar="HOST:PORT", help=text)
        group.add_argument("--num-processes", metavar="N", type=int, help="number of processes")
        text = "index of this process, from 0 to N - 1; it uses all GPUs visible to it"
        group.add_argument("--process-id", metavar="I", type=int, help=text)
    if takes == "CONFIG.yaml":
        add("config", metavar=takes)
    elif takes == "WHAT":
        text = "a run's directory, a checkpoint, a Hugging Face folder or a hub name"
        add("what", metavar=takes, help=text)
    if takes is not None:
        text = "changes a field of the config"
        add("changes", metavar="key.path=value", nargs="*", default=[], help=text)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, Any]:
    """Values of a command's arguments by name, without --verbose; `process` is this process's
    place in its job. Raises: UserError: see `cluster.detect_process`."""
    values = vars(parser.parse_intermixed_args(arguments))
    del values["verbose"]
    if "process_id" in values:
        values["process"] = cluster.detect_process(
            os.environ,
            coordinator=values.pop("coordinator"),
            num_processes=values.pop("num_processes"),
            process_index=values.pop("process_id"),
        )
    return values


def write_output(path: pathlib.Path, content: str, *, flag: str) -> None:
    """Writes a file that a user named, which may be a link, or a device such as /dev/stdout.
    Raises: UserError if it cannot be written."""
    try:
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8") as file:
                file.write(content)
        else:
            files.write_atomic(pathlib.Path(os.path.realpath(path)), content)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}. Name a file in another folder."
        raise UserError(f"{flag} = {path}: {reason}") from None


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
    output.protect()
    # it has a handler of its own; absl's at the root would print each retry again
    logging.getLogger("huggingface_hub").propagate = False
    code: int = ExitCode.OK
    try:
        main(sys.argv[1:])
        distributed.shutdown()
    except (Exception, KeyboardInterrupt) as error:
        code, message = _explain(error)
        if "--verbose" in sys.argv and message is not None:
            message = f"{traceback.format_exc()}{message}"
        message = distributed.to_lines(message or traceback.format_exc())
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if (reason := output.find_full_disk()) is not None:
        print(f"standard output: {reason}. Some lines are lost.", file=sys.stderr, flush=True)
    if code != ExitCode.OK and distributed.this_process.num_processes > 1:
        distributed.abort_job(code)
    sys.exit(code)


def _explain(error: BaseException) -> tuple[int, str | None]:
    """Exit code and message of an error; no message for a bug, of which the traceback is needed."""
    match error:
        case UserError():
            return ExitCode.USER_ERROR, "\n".join(error.problems)
        case NeedsAttentionError():
            return ExitCode.NEEDS_ATTENTION, str(error)
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED, str(error) or "interrupted"
    if (failed_peer := distributed.find_failed_peer()) is not None:
        # this error follows from the peer's, and its traceback would hide the cause
        index, code = failed_peer
        return code, f"ends because process {index} failed with exit code {code}"
    message = None
    if distributed.this_process.num_processes > 1 and _LOST_PEER.search(str(error)):
        reason = errors.first_line(error)
        message = f"cannot reach another process of this run, which may have been killed: {reason}"
    return ExitCode.INTERNAL_ERROR, message
