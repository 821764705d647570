"""Weights & Biases: online where there is a login, else offline files for `wandb sync`.

W&B's environment variables hold: WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL, WANDB_PROJECT,
WANDB_NAME, WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS, WANDB_DIR.
"""

import contextlib
import os
import pathlib
import secrets
import signal
from collections.abc import Sequence
from typing import Any

from jaxsp.core.errors import UserError
from jaxsp.processes import distributed
from jaxsp.reporting.trackers import tracker
from jaxsp.reporting.trackers.background import describe_error
from jaxsp.reporting.trackers.tracker import Outcome, Point, TrackedRun, Tracker

NAME = "wandb"

FINISH_TIMEOUT_S = 10.0
"""Time limit for W&B's process to upload the rest at the end, and at most run.shutdown_grace."""

INIT_TIMEOUT_S = 8.0
"""Time limit for W&B's server to accept the run, which is then recorded offline. W&B's default is
90, in which a short run would end and leave nothing to upload."""

ENVIRONMENT = {
    "WANDB_SILENT": "true",
    # Otherwise W&B sends its errors to its makers, which delays the end of a process by 20 s where
    # there is no network
    "WANDB_ERROR_REPORTING": "false",
}
"""Settings of W&B that a user may override."""

_OFFLINE_MODES = ("offline", "dryrun")


def find_mode() -> str:
    """Mode of W&B: that of its settings, but offline where there is no login.

    Raises: UserError if W&B refuses its settings, for example a key of the wrong length.
    """
    import wandb

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        mode = wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
    except Exception as error:  # W&B raises errors of many kinds
        raise UserError(
            f"logging.trackers = [wandb]: wandb refuses its settings: {describe_error(error)}. "
            "Correct them, or set WANDB_MODE=offline in the environment."
        ) from None
    return mode


class WandbTracker(Tracker):
    """Run of W&B, which a process of its own (wandb-core) writes and uploads.

    Offline, each process of a run writes a folder with all steps so far, so that the latest one is
    complete. Online, W&B keeps the first values of steps that a run repeats.
    """

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        self._wandb_run: Any = None
        self._num_known_steps = 0
        self._must_be_offline = False

    @classmethod
    def describe(cls, run: TrackedRun) -> str:
        """Describes the mode, and how to upload a run that is offline."""
        mode = find_mode()
        if mode in _OFFLINE_MODES:
            reason = "WANDB_MODE" if "WANDB_MODE" in os.environ else "no login"
            folder = _find_folder(run)
            return f"wandb offline ({reason}); upload with wandb sync {folder}/latest-run"
        return f"wandb {mode}, project {_find_project(run)}"

    def start(self) -> None:
        self.abandon()  # what is left of an earlier attempt
        mode = "offline" if self._must_be_offline else find_mode()
        run_id = self._run.read_id(NAME)
        is_new = run_id is None
        if is_new:
            run_id = secrets.token_hex(4)
            self._run.write_id(NAME, run_id)
        try:
            self._init(mode, run_id, is_new=is_new)
        except Exception as error:  # W&B raises errors of many kinds
            if mode in _OFFLINE_MODES:
                raise
            self._must_be_offline = True
            self.abandon()
            self._init("offline", run_id, is_new=True)
            distributed.log(
                f"wandb: {describe_error(error)}. This run is recorded offline; upload it with "
                f"wandb sync {self._wandb_run.settings.sync_dir}"
            )

    def log(self, points: Sequence[Point]) -> None:
        import wandb

        for point in points:
            values: dict[str, Any] = dict(point.numbers)
            if point.texts:
                row = [point.step, *point.texts.values()]
                values[point.group] = wandb.Table(columns=["step", *point.texts], data=[row])
            self._wandb_run.log(values, step=point.step)

    def has(self, point: Point) -> bool:
        return point.step < self._num_known_steps

    def finish(self, outcome: Outcome) -> None:
        try:
            self._wandb_run.finish(exit_code=int(outcome == "failed"))
        except TimeoutError:
            distributed.log(
                "wandb: values are still to be uploaded; upload them with wandb sync "
                f"{self._wandb_run.settings.sync_dir}"
            )

    def abandon(self) -> None:
        """Kills W&B's process, because at its end this process would wait for it."""
        import wandb

        for pid in _find_service_processes():
            os.kill(pid, signal.SIGKILL)
        # removes W&B's exit handler first, then fails
        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()

    def _init(self, mode: Any, run_id: str, *, is_new: bool) -> None:
        import wandb

        is_offline = mode in _OFFLINE_MODES
        folder = _find_folder(self._run)
        folder.mkdir(parents=True, exist_ok=True)
        grace_s = self._run.shutdown_grace.total_seconds()
        self._wandb_run = wandb.init(
            mode=mode,
            id=run_id,
            # W&B's server replaces a run that does not resume, which is right for offline folders:
            # each has all steps
            resume=None if is_new or is_offline else "allow",
            dir=folder.parent,
            project=_find_project(self._run),
            name=self._run.name or os.environ.get("WANDB_NAME") or self._run.default_name,
            config=self._run.config,
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=max(1.0, min(FINISH_TIMEOUT_S, grace_s)),
                finish_timeout_raises=True,
            ),
        )
        self._num_known_steps = self._wandb_run.step


def _find_folder(run: TrackedRun) -> pathlib.Path:
    return pathlib.Path(os.environ.get("WANDB_DIR") or run.directory) / "wandb"


def _find_project(run: TrackedRun) -> str:
    return run.project or os.environ.get("WANDB_PROJECT") or tracker.DEFAULT_PROJECT


def _find_service_processes() -> list[int]:
    """Processes of W&B that this process has started."""
    pids = []
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
            if name == "wandb-core" and int(rest.split()[1]) == os.getpid():
                pids.append(int(status.parent.name))
    return pids
