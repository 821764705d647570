"""Faults at random moments of a run, until it is done all the same; then it is compared with one that nothing interrupted.

    python -m tests.faults.kills --steps 90 --faults kill=20 kill-in-save=10
    python -m tests.faults.kills --steps 90 --faults kill=8 kill-in-save=4 --meshes 2x4 8x1 1x2
    python -m tests.faults.kills --steps 20000 --faults kill=20 kill-in-save=10 flip=5 term=15 pause=10

Exit code 0 where nothing is lost: each step has one line, losses and weights are the same bit for bit, or to rounding where
the mesh changes between two lives of the run.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import yaml

from jaxsp.checkpoint import files
from jaxsp.runtime import run_paths
from tests import batches, tolerances

REPO = pathlib.Path(__file__).parent.parent.parent


KINDS = ("kill", "kill-in-save", "flip", "term", "pause")
"""SIGKILL at any moment, starting and compiling too; SIGKILL while a checkpoint is written; SIGKILL, and a bit of the newest
checkpoint is another when the run goes on; SIGTERM; SIGSTOP for some seconds."""

SAVE_EVERY, EVAL_EVERY = 3, 10

EXACT = (
    "step",
    "epoch",
    "num_rows",
    "num_tokens",
    "num_loss_tokens",
    "num_tokens_total",
    "padding_fraction",
    "learning_rate",
)
ROUNDED = ("loss", "grad_norm", "token_accuracy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What was there when a fault came."""

    kind: str
    steps: int
    """Lines of metrics.jsonl."""
    unfinished: int
    """Checkpoints that were being written."""
    code: int | None
    """Exit code; None for a process that went on."""


class Case:
    """A folder with documents, a config, and the runs that are made from them."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        num_steps: int,
        save_every: int = SAVE_EVERY,
        eval_every: int = EVAL_EVERY,
    ):
        self.folder, self.num_steps = folder, num_steps
        self.config = folder / "config.yaml"
        draw = np.random.default_rng(0)
        for name, lengths in (("train", [*draw.integers(1, 60, 120), 300]), ("eval", [40, 20, 17])):
            records = [
                json.dumps({"input_ids": draw.integers(0, 257, length).tolist()})
                for length in lengths
            ]
            (folder / f"{name}.jsonl").write_text("\n".join(records), encoding="utf-8")
        fields = {
            "run": {
                "directory": "?",
                "steps": num_steps,
                "save_every": save_every,
                "eval_every": eval_every,
            },
            "model": {"config": batches.UNEVEN_LLAMA, "compute_dtype": "float32"},
            "mesh": {"data": 2, "seq": 4, "virtual_cpu_devices": 8},
            "data": {
                "train": [{"source": str(folder / "train.jsonl"), "format": "tokens"}],
                "eval": [
                    {"source": str(folder / "eval.jsonl"), "format": "tokens", "name": "held-out"}
                ],
                "row_tokens": 64,
                "max_segments_per_row": 8,
            },
            "batch": {"rows_per_step": 8},
            # at 0.01 AdamW makes 3e-5 of the rounding between two meshes within 18 steps, without any fault
            "optimizer": {"learning_rate": 0.001, "warmup_steps": 2, "weight_decay": 0.1},
            "logging": {"tensorboard": False},
        }
        self.config.write_text(yaml.safe_dump(fields), encoding="utf-8")

    def start(self, name: str, mesh: str) -> subprocess.Popen:
        """A process that begins the run of this name, or goes on with it."""
        data, seq = map(int, mesh.split("x"))
        words = [f"run.directory={self.folder / name}", f"mesh.data={data}", f"mesh.seq={seq}"]
        words.append(f"mesh.virtual_cpu_devices={data * seq}")
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jaxsp.train", str(self.config), *words],
                cwd=REPO,
                stdout=log,
                stderr=log,
            )

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def num_lines(self, name: str) -> int:
        path = self.folder / name / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def has_lines(self, name: str, number: int) -> bool:
        return self.num_lines(name) >= number

    def has_begun_to_save(self, name: str, *, beside: set[str]) -> bool:
        """Whether a checkpoint is being written that is not one of these."""
        return bool(self.unfinished(name) - beside)

    def unfinished(self, name: str) -> set[str]:
        """Checkpoints that are being written, or were when the process ended."""
        folder = self.folder / name / "checkpoints"
        return (
            {
                entry.name
                for entry in os.scandir(folder)
                if entry.name.endswith(files.PARTIAL_SUFFIX)
            }
            if folder.exists()
            else set()
        )

    def lines(self, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / name / file).read_text(encoding="utf-8").splitlines()
        ]


def straight(case: Case, mesh: str, *, patience_s: float) -> tuple[float, list[int]]:
    """Runs it without a fault. Returns seconds until the first step, and the process's KiB of memory over time."""
    began, first, memory = time.monotonic(), None, []
    child = case.start("straight", mesh)
    while child.poll() is None:
        time.sleep(0.05)
        if first is None and case.num_lines("straight"):
            first = time.monotonic() - began
        if first is not None and len(memory) <= 20 * case.num_lines("straight") // case.num_steps:
            memory.append(_resident_kib(child.pid))
        if time.monotonic() - began > patience_s:
            child.kill()
    if child.returncode or first is None:
        raise SystemExit(
            f"the straight run failed with {child.returncode}:\n{case.said('straight')[-3000:]}"
        )
    return first, memory


def torn(
    case: Case,
    kinds: Sequence[str],
    meshes: Sequence[str],
    *,
    starts_in_s: float,
    seed: int,
    patience_s: float,
) -> list[Seen]:
    """Runs it with a fault of each of these kinds, one after another, and then to its end."""
    draw, seen = random.Random(seed), []
    # as many steps between two faults as there are for them, those that are lost each time not counted
    room = max(1, case.num_steps // (len(kinds) + 1))
    until = time.monotonic() + patience_s
    for number, kind in enumerate(kinds):
        child = case.start("torn", meshes[number % len(meshes)])
        if kind == "kill" and draw.random() < 0.3:
            time.sleep(draw.uniform(0, starts_in_s))  # reading, compiling, restoring
        else:
            goal = case.num_lines("torn") + draw.randint(1, room)
            _wait(child, functools.partial(case.has_lines, "torn", goal), until)
            if kind == "kill-in-save":
                begun = functools.partial(
                    case.has_begun_to_save, "torn", beside=case.unfinished("torn")
                )
                _wait(child, begun, until, every_s=0.0005)
                time.sleep(draw.uniform(0, 0.05))
            else:
                time.sleep(draw.uniform(0, 0.3))
        seen.append(_strike(case, child, kind, draw))
        if child.poll() is None:  # only paused
            seen.append(_strike(case, child, "kill", draw))
        if seen[-1].code == 0 and seen[-1].kind != "term":
            break  # it was done before the fault came
    child = case.start("torn", meshes[len(kinds) % len(meshes)])
    _wait(child, lambda: False, until)
    if child.returncode:
        raise SystemExit(
            f"the run does not go on, exit code {child.returncode}:\n{case.said('torn')[-3000:]}"
        )
    return seen


def _strike(case: Case, child: subprocess.Popen, kind: str, draw: random.Random) -> Seen:
    if kind == "pause":
        child.send_signal(signal.SIGSTOP)
        time.sleep(draw.uniform(1, 5))
        child.send_signal(signal.SIGCONT)
        time.sleep(draw.uniform(0, 1))
    elif kind == "term":
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=120)
    else:
        child.kill()
        child.wait()
    seen = Seen(
        kind=kind,
        steps=case.num_lines("torn"),
        unfinished=len(case.unfinished("torn")),
        code=child.poll(),
    )
    if kind == "term" and child.returncode:
        raise SystemExit(f"SIGTERM: exit code {child.returncode}:\n{case.said('torn')[-3000:]}")
    if kind == "flip":
        _flip(case, draw)
    return seen


def _flip(case: Case, draw: random.Random) -> None:
    """Another bit in the largest file of the newest checkpoint, where there is one before it."""
    folder = case.folder / "torn/checkpoints"
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
    if len(steps) < 2:
        return
    path = max(
        (folder / str(steps[-1])).rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else -1,
    )
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _wait(child: subprocess.Popen, is_there: Any, until: float, *, every_s: float = 0.01) -> None:
    """Until something is there, or the process has ended."""
    while child.poll() is None and not is_there():
        if time.monotonic() > until:
            child.kill()
            raise SystemExit("the run makes no progress")
        time.sleep(every_s)


def _resident_kib(pid: int) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def differences(case: Case, *, exactly: bool) -> Iterator[str]:
    """What the torn run has otherwise than the straight one."""
    for file in ("metrics.jsonl", "eval.jsonl"):
        straight, torn = case.lines("straight", file), case.lines("torn", file)
        steps = [line["step"] for line in torn]
        if steps != [line["step"] for line in straight]:
            again = [step for step, times in collections.Counter(steps).items() if times > 1]
            yield f"{file}: {len(steps)} lines in place of {len(straight)}; more than once: {again[:5]}"
            continue
        for one, other in zip(straight, torn, strict=True):
            for field in one:
                same = True
                if field in EXACT:
                    same = one[field] == other[field]
                elif field in ROUNDED:
                    same = (
                        one[field] == other[field] if exactly else _near(one[field], other[field])
                    )
                if not same:
                    yield f"{file}: step {one['step']}: {field} {one[field]!r} -> {other[field]!r}"
    arrays = [_arrays(case.folder / name) for name in ("straight", "torn")]
    for path, array in arrays[0].items():
        if exactly and array.tobytes() != arrays[1][path].tobytes():
            yield f"{path}: the last checkpoint differs by {np.abs(array - arrays[1][path]).max():.1e}"


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= tolerances.MESH * abs(one)


def _arrays(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of a run's last checkpoint as it is stored."""
    import jax
    import orbax.checkpoint as ocp

    found = {}
    newest = run_paths.find_latest(run)
    assert newest is not None
    for item in (run_paths.MASTER, run_paths.OPT):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            shapes = reader.metadata(newest / item).item_metadata.tree
            on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
            tree = reader.restore(newest / item, args=ocp.args.PyTreeRestore(restore_args=on_host))
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        found |= {f"{item}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}
    return found


def main(arguments: Sequence[str], *, folder: pathlib.Path) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.kills", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument(
        "--faults",
        nargs="+",
        default=["kill=20", "kill-in-save=10"],
        metavar="KIND=COUNT",
        help=str(KINDS),
    )
    parser.add_argument(
        "--meshes", nargs="+", default=["2x4"], help="data x seq, one after another"
    )
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY)
    parser.add_argument("--eval-every", type=int, default=EVAL_EVERY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=3600, metavar="S")
    given = parser.parse_args(arguments)
    kinds = [
        kind
        for kind, _, count in (word.partition("=") for word in given.faults)
        for _ in range(int(count))
    ]
    if unknown := {*kinds} - {*KINDS}:
        parser.error(f"{unknown}: choose from {KINDS}")
    random.Random(given.seed).shuffle(kinds)

    case = Case(
        folder, num_steps=given.steps, save_every=given.save_every, eval_every=given.eval_every
    )
    began = time.monotonic()
    first, memory = straight(case, given.meshes[0], patience_s=given.patience)
    print(
        f"straight: {given.steps} steps in {time.monotonic() - began:.0f} s, the first after {first:.1f} s",
        flush=True,
    )
    print(f"memory over time, MiB: {' '.join(str(kib // 1024) for kib in memory)}", flush=True)
    began = time.monotonic()
    seen = torn(
        case, kinds, given.meshes, starts_in_s=first, seed=given.seed, patience_s=given.patience
    )
    for one in seen:
        print(
            f"{one.kind:13} at step {one.steps:6}, {one.unfinished} checkpoints unfinished, exit {one.code}"
        )
    counts = collections.Counter(one.kind for one in seen)
    in_save = sum(one.unfinished > 0 for one in seen)
    print(
        f"torn: {dict(counts)}, {in_save} while a checkpoint was written, in {time.monotonic() - began:.0f} s"
    )
    found = list(differences(case, exactly=len(given.meshes) == 1))
    print("\n".join(found[:20]) or "nothing is lost", flush=True)
    return int(bool(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="jaxsp-faults-") as made:
        os.environ.setdefault("HF_DATASETS_CACHE", f"{made}/datasets")
        code = main(sys.argv[1:], folder=pathlib.Path(made))
        if code:
            kept = tempfile.mkdtemp(prefix="jaxsp-faults-failed-")
            shutil.copytree(made, kept, dirs_exist_ok=True)
            print(f"kept in {kept}", file=sys.stderr)
    sys.exit(code)
