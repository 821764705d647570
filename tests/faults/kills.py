"""Random faults during a run until it is done; then it is compared with an undisturbed run.

    python -m tests.faults.kills --steps 90 --faults kill=20 kill-in-save=10
    python -m tests.faults.kills --steps 90 --faults kill=8 kill-in-save=4 --meshes 2x4 8x1 1x2
    python -m tests.faults.kills --steps 30 --faults kill=4 --adapter lora
    python -m tests.faults.kills --steps 30 --faults kill=2 kill-in-save=2 --hybrid
    python -m tests.faults.kills --steps 30 --faults kill=4 --objective distill
    python -m tests.faults.kills --steps 20000 --faults kill=20 kill-in-save=10 flip=5 term=15

Exit code 0 if nothing is lost: each step has one line, and losses and weights are bitwise equal, or
equal to rounding if the mesh changes between two parts of the run.
"""

import argparse
import collections
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import yaml

from jaxsp.checkpoint import run_paths
from jaxsp.core import files
from tests import batches, commands, small_runs, tolerances

KINDS = {
    "kill": "SIGKILL at any time, also at start and while compiling",
    "kill-in-save": "SIGKILL while a checkpoint is written",
    "flip": "SIGKILL, and one bit of the latest checkpoint is flipped before the run resumes",
    "term": "SIGTERM",
    "pause": "SIGSTOP for some seconds",
}
"""Kinds of faults."""

SAVE_EVERY = 3
EVAL_EVERY = 10

EXACT = (*commands.COUNTS, "learning_rate")
ROUNDED = (
    *("loss", "grad_norm", "token_accuracy"),
    *("cross_entropy", "divergence", "teacher_agreement"),
    *("num_trajectories", "ratio", "clip_low", "clip_high", "entropy"),
)

OBJECTIVES = ("sft", "distill", "predictions", "policy")
"""predictions: distill with a teacher's stored predictions."""


class Run:
    """A run that is started again after each fault, in its own directory."""

    def __init__(self, config: pathlib.Path, name: str):
        self.config = config
        self.directory = config.parent / name
        self._log = config.parent / f"{name}.log"

    def start(self, mesh: str) -> subprocess.Popen:
        """Starts or resumes the run. Args: mesh: sizes of data and seq, such as 2x4."""
        data, seq = map(int, mesh.split("x"))
        changes = [
            f"run.directory={self.directory}",
            f"mesh.data={data}",
            f"mesh.seq={seq}",
            f"mesh.virtual_cpu_devices={data * seq}",
        ]
        with self._log.open("ab") as log:
            words = ("-m", "jaxsp.train", self.config, *changes)
            return commands.start_python(*words, stdout=log, stderr=log)

    def read_log(self) -> str:
        """Last output of its processes."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def num_lines(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def unfinished(self) -> set[str]:
        """Checkpoints that are being written, or were when a process ended."""
        folder = self.directory / "checkpoints"
        if not folder.exists():
            return set()
        names = [entry.name for entry in os.scandir(folder)]
        return {name for name in names if name.endswith(files.PARTIAL_SUFFIX)}

    def read_lines(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return commands.read_lines(self.directory / file)


class Case:
    """Data and config of two runs: one undisturbed, one with faults."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        num_steps: int,
        save_every: int = SAVE_EVERY,
        eval_every: int = EVAL_EVERY,
        adapter: str = "none",
        is_hybrid: bool = False,
        objective: str = "sft",
    ):
        self.num_steps = num_steps
        config = folder / "config.yaml"
        self.undisturbed = Run(config, "undisturbed")
        self.faulty = Run(config, "faulty")
        lengths = [*np.random.default_rng(0).integers(1, 60, 120), 300]
        if objective == "policy":
            commands.write_trajectories(folder / "train.jsonl", num_records=120)
            commands.write_trajectories(folder / "eval.jsonl", num_records=3)
        else:
            commands.write_documents(folder / "train.jsonl", lengths)
            commands.write_documents(folder / "eval.jsonl", [40, 20, 17], seed=1)
        data_format = "trajectories" if objective == "policy" else "tokens"
        train, evaluation = (
            {"source": str(folder / f"{name}.jsonl"), "format": data_format}
            for name in ("train", "eval")
        )
        objective_fields = {"type": objective}
        if objective in ("distill", "predictions"):
            objective_fields = {"type": "distill", "teacher": str(folder / "teacher")}
            small_runs.write_model(folder / "teacher", batches.SMALL_LLAMA, std=0.4)
        if objective == "predictions":
            objective_fields["predictions"] = str(folder / "predictions")
        model = batches.UNEVEN_HYBRID if is_hybrid else batches.UNEVEN_LLAMA
        fields = small_runs.make_fields(
            folder,
            run={"steps": num_steps, "save_every": save_every, "eval_every": eval_every},
            model={"config": model},
            mesh={"data": 2, "seq": 4, "virtual_cpu_devices": 8},
            data={
                "train": [train],
                "eval": [evaluation | {"name": "held-out"}],
                "max_segments_per_row": 8,
            },
            batch={"rows_per_step": 8},
            # At 0.01, AdamW turns the rounding between two meshes into 3e-5 within 18 steps
            optimizer={"learning_rate": 0.001, "warmup_steps": 2, "weight_decay": 0.1},
            adapter={"type": adapter},
            objective=objective_fields,
        )
        config.write_text(yaml.safe_dump(fields), encoding="utf-8")
        if objective == "predictions" and not (folder / "predictions").exists():
            done = commands.run_python("-m", "jaxsp.score", config)
            assert done.returncode == 0, done.stderr


def run_undisturbed(case: Case, mesh: str, *, timeout_s: float) -> float:
    """Runs without a fault. Returns: seconds until the first step."""
    run = case.undisturbed
    start_s = time.monotonic()
    process = run.start(mesh)
    _wait_until(lambda: run.num_lines() > 0, process, start_s + timeout_s)
    first_step_s = time.monotonic() - start_s
    _wait_until(lambda: False, process, start_s + timeout_s)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode} without a fault:\n{run.read_log()}")
    return first_step_s


def run_with_faults(
    case: Case,
    kinds: Sequence[str],
    meshes: Sequence[str],
    *,
    first_step_s: float,
    seed: int,
    timeout_s: float,
) -> None:
    """Runs with one fault of each of these kinds after another, and then to the end."""
    run = case.faulty
    rng = random.Random(seed)
    # Steps that are lost at each fault come in addition
    max_steps = max(1, case.num_steps // (len(kinds) + 1))
    deadline_s = time.monotonic() + timeout_s
    for number, kind in enumerate(kinds):
        process = run.start(meshes[number % len(meshes)])
        if kind == "kill" and rng.random() < 0.3:
            time.sleep(rng.uniform(0, first_step_s))  # while it reads, compiles or restores
        else:
            _wait_for_moment(run, process, kind, rng, max_steps=max_steps, deadline_s=deadline_s)
        _cause_fault(run, process, kind, rng)
        if process.poll() is None:  # after a pause
            _cause_fault(run, process, kind := "kill", rng)
        if process.returncode == 0 and kind != "term":
            break  # the run was done before the fault
    process = run.start(meshes[len(kinds) % len(meshes)])
    _wait_until(lambda: False, process, deadline_s)
    if process.returncode:
        raise SystemExit(f"cannot resume, exit code {process.returncode}:\n{run.read_log()}")


def _wait_for_moment(
    run: Run,
    process: subprocess.Popen,
    kind: str,
    rng: random.Random,
    *,
    max_steps: int,
    deadline_s: float,
) -> None:
    """Waits for some steps, and for the begin of a checkpoint if the fault is in a save."""
    num_lines = run.num_lines() + rng.randint(1, max_steps)
    _wait_until(lambda: run.num_lines() >= num_lines, process, deadline_s)
    if kind == "kill-in-save":
        before = run.unfinished()
        _wait_until(lambda: bool(run.unfinished() - before), process, deadline_s, poll_s=0.0005)
        time.sleep(rng.uniform(0, 0.05))
    else:
        time.sleep(rng.uniform(0, 0.3))


def _cause_fault(run: Run, process: subprocess.Popen, kind: str, rng: random.Random) -> None:
    if kind == "pause":
        process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(1, 5))
        process.send_signal(signal.SIGCONT)
        time.sleep(rng.uniform(0, 1))
    elif kind == "term":
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    else:
        process.kill()
        process.wait()
    state = f"step {run.num_lines():6}, {len(run.unfinished())} unfinished checkpoints"
    print(f"{kind:13} at {state}, exit code {process.poll()}")
    if kind == "term" and process.returncode:
        raise SystemExit(f"SIGTERM: exit code {process.returncode}:\n{run.read_log()}")
    if kind == "flip":
        _flip_bit(run, rng)


def _flip_bit(run: Run, rng: random.Random) -> None:
    """Flips a bit in the largest file of the latest checkpoint, if there is an earlier one."""
    folder = run.directory / "checkpoints"
    steps = run_paths.list_steps(folder)
    if len(steps) < 2:
        return
    files = [path for path in (folder / str(steps[-1])).rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _wait_until(
    condition: Callable[[], bool],
    process: subprocess.Popen,
    deadline_s: float,
    *,
    poll_s: float = 0.01,
) -> None:
    """Waits until a condition holds, or the process has ended."""
    while process.poll() is None and not condition():
        if time.monotonic() > deadline_s:
            process.kill()
            raise SystemExit("the run makes no progress")
        time.sleep(poll_s)


def differences(case: Case, *, is_exact: bool) -> Iterator[str]:
    """Finds differences between the two runs.

    Args: is_exact: False: compares losses to rounding, and no weights.
    """
    for file in ("metrics.jsonl", "eval.jsonl"):
        expected = case.undisturbed.read_lines(file)
        lines = case.faulty.read_lines(file)
        steps = [line["step"] for line in lines]
        if steps != [line["step"] for line in expected]:
            counts = collections.Counter(steps)
            repeated = [step for step, count in counts.items() if count > 1]
            yield f"{file}: {len(steps)} of {len(expected)} lines; more than once: {repeated[:5]}"
            continue
        for expected_line, line in zip(expected, lines, strict=True):
            for field, value in expected_line.items():
                if not _is_equal(field, value, line[field], is_exact=is_exact):
                    yield f"{file}: step {line['step']}: {field} {value!r} -> {line[field]!r}"
    arrays = _read_arrays(case.faulty)
    for path, expected_array in _read_arrays(case.undisturbed).items():
        if is_exact and expected_array.tobytes() != arrays[path].tobytes():
            difference = np.abs(expected_array - arrays[path]).max()
            yield f"{path}: the last checkpoint differs by {difference:.1e}"


def _is_equal(field: str, expected: Any, value: Any, *, is_exact: bool) -> bool:
    """Compares values of a field; those that depend on time are always equal."""
    if field in ROUNDED and not is_exact:
        return abs(expected - value) <= tolerances.MESH * abs(expected)
    return field not in (*EXACT, *ROUNDED) or expected == value


def _read_arrays(run: Run) -> dict[str, np.ndarray]:
    """Arrays of the last checkpoint as they are stored."""
    import jax
    import orbax.checkpoint as ocp

    arrays = {}
    checkpoint = run_paths.find_latest(run.directory)
    assert checkpoint is not None
    for item in (run_paths.MASTER, run_paths.OPT):
        path = checkpoint / item
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            shapes = reader.metadata(path).item_metadata.tree
            on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
            tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=on_host))
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[f"{item}{jax.tree_util.keystr(keys)}"] = np.asarray(leaf)
    return arrays


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses arguments. Returns them, and the kinds of all faults in random order."""
    kinds_help = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.kills", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument(
        "--faults",
        nargs="+",
        default=["kill=20", "kill-in-save=10"],
        metavar="KIND=COUNT",
        help=kinds_help,
    )
    parser.add_argument(
        "--meshes", nargs="+", default=["2x4"], help="data x seq, one after another"
    )
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY)
    parser.add_argument("--eval-every", type=int, default=EVAL_EVERY)
    parser.add_argument("--adapter", default="none", metavar="TYPE", help="adapter.type")
    parser.add_argument("--hybrid", action="store_true", help="a model with gated delta nets")
    parser.add_argument("--objective", choices=OBJECTIVES, default="sft", help="objective.type")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=3600, metavar="S")
    args = parser.parse_args(arguments)
    kinds: list[str] = []
    for text in args.faults:
        kind, _, count = text.partition("=")
        kinds += [kind] * int(count)
    if unknown := {*kinds} - {*KINDS}:
        parser.error(f"{unknown}: choose from {', '.join(KINDS)}")
    random.Random(args.seed).shuffle(kinds)
    return args, kinds


def main(arguments: Sequence[str], *, folder: pathlib.Path) -> int:
    """Runs the comparison in a folder. Returns the exit code."""
    args, kinds = _parse(arguments)
    case = Case(
        folder,
        num_steps=args.steps,
        save_every=args.save_every,
        eval_every=args.eval_every,
        adapter=args.adapter,
        is_hybrid=args.hybrid,
        objective=args.objective,
    )
    start_s = time.monotonic()
    first_step_s = run_undisturbed(case, args.meshes[0], timeout_s=args.patience)
    seconds = time.monotonic() - start_s
    print(f"undisturbed: {args.steps} steps in {seconds:.0f} s, the first after {first_step_s:.1f}")
    start_s = time.monotonic()
    run_with_faults(
        case,
        kinds,
        args.meshes,
        first_step_s=first_step_s,
        seed=args.seed,
        timeout_s=args.patience,
    )
    print(f"faults: {len(kinds)} in {time.monotonic() - start_s:.0f} s")
    problems = list(differences(case, is_exact=len(args.meshes) == 1))
    print("\n".join(problems[:20]) or "nothing is lost", flush=True)
    return int(bool(problems))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="jaxsp-faults-") as temporary:
        os.environ.setdefault("HF_DATASETS_CACHE", f"{temporary}/datasets")
        code = main(sys.argv[1:], folder=pathlib.Path(temporary))
        if code:
            copy = tempfile.mkdtemp(prefix="jaxsp-faults-failed-")
            shutil.copytree(temporary, copy, dirs_exist_ok=True)
            print(f"files are in {copy}", file=sys.stderr)
    sys.exit(code)
