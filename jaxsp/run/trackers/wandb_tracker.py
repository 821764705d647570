"""Weights & Biases: online where there is a login, else offline files for `wandb sync`.

W&B's environment variables hold, such as WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY and WANDB_DIR.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxsp.run.trackers.tracker import Client, Outcome, Service, TrackedRun
from jaxsp.system import distributed

INIT_TIMEOUT_S = 30.0
"""Time limit for W&B's server to accept the run. W&B's default is 90."""

FINISH_TIMEOUT_S = 10.0
"""Time limit at the end to upload the rest, at most run.shutdown_grace. W&B has none."""


class Wandb(Service):
    """Weights & Biases; offline, in run.directory/wandb, without a login."""

    type: Literal["wandb"] = "wandb"
    package: ClassVar[str] = "wandb"

    def start(self, run: TrackedRun) -> Client:
        import wandb

        # Otherwise W&B sends its errors to its makers
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode: Any = wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        grace_s = run.shutdown_grace.total_seconds()
        started = wandb.init(
            mode=mode,
            id=run.ids.get("wandb"),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run.directory,
            project=self.find_project("WANDB_PROJECT"),
            name=self.find_name("WANDB_NAME", run),
            config=run.config,
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=max(1.0, min(FINISH_TIMEOUT_S, grace_s)),
                finish_timeout_raises=True,
            ),
        )
        run.keep_id("wandb", started.id)
        if started.offline:
            distributed.log(f"wandb: offline; upload with wandb sync {started.settings.sync_dir}")
        return _WandbClient(started)


class _WandbClient(Client):
    """Run of W&B, whose process of its own (wandb-core) writes and uploads what it is given.

    Online, W&B keeps the first values of steps that a resumed run repeats.
    """

    def __init__(self, run: Any):
        self._run = run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))
