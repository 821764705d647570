"""Damages files of a checkpoint, and checks that a restore notices it.

`python -m tests.faults.damage --flips 200 --truncations 20` flips bits, truncates and removes
files. It prints a table by kind of file, and exits with 1 if a restore returned a different state
without an error.
"""

import argparse
import collections
import contextlib
import dataclasses
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

import jax
import numpy as np
import rich.console

from jaxsp.checkpoint import checksums, reader
from jaxsp.core.errors import UserError
from jaxsp.run import build, config_file, trainer
from jaxsp.sharding import sharding
from jaxsp.training import train_state
from jaxsp.training.specs import StepSpec
from tests import batches, commands

NOTICED = "noticed"
HARMLESS = "harmless"
SILENT = "silent"
OUTCOMES = (NOTICED, HARMLESS, SILENT)


@dataclasses.dataclass(frozen=True)
class Damage:
    """One damage of a file."""

    path: pathlib.Path
    kind: str
    """`flip`, `truncate` or `remove`."""
    position: int = 0
    """Bit to flip, or length in bytes to truncate to."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the file is damaged."""
        content = self.path.read_bytes()
        damaged = bytearray(content)
        if self.kind == "flip":
            damaged[self.position // 8] ^= 1 << self.position % 8
        elif self.kind == "truncate":
            del damaged[self.position :]
        self.path.write_bytes(damaged)
        if self.kind == "remove":
            self.path.unlink()
        try:
            yield
        finally:
            self.path.write_bytes(content)


class SavedRun:
    """A checkpoint of a small run, and its content."""

    def __init__(self, folder: pathlib.Path):
        commands.write_documents(folder / "data.jsonl", [64] * 8)
        fields = {
            "run": {"directory": str(folder / "run"), "steps": 2, "save_every": None},
            "model": {
                "config": batches.SMALL_LLAMA | {"intermediate_size": 111},
                "compute_dtype": "float32",
            },
            "mesh": {"data": 2, "seq": 4},
            "data": {
                "train": [{"source": str(folder / "data.jsonl"), "format": "tokens"}],
                "row_tokens": 64,
            },
            "batch": {"rows_per_step": 8},
            "optimizer": {"learning_rate": 0.1},
            "logging": {"trackers": []},
        }
        config = config_file.parse(fields)
        inputs = build.build_training(config, devices=jax.devices()[:8])
        spec = inputs.spec
        self.spec = spec
        trainer.train(inputs, rich.console.Console(quiet=True))
        self.path = folder / "run/checkpoints/2"
        self.table = self.spec.table
        self.state_shapes = train_state.abstract_inputs(self.spec)[0]
        self.expected = self.restore()

    def restore(self, spec: StepSpec | None = None) -> dict[str, bytes]:
        """Restores everything, by name, without padding.

        Args: spec: the step to restore into; None: that of the run.
        """
        shapes = train_state.abstract_inputs(spec)[0] if spec else self.state_shapes
        meta = reader.read_meta(self.path)
        state = reader.restore(self.path, shapes, table=self.table, num_steps=meta.step)
        items = {"master": state.master, "opt": state.opt_state}
        unpadded = checksums.unpadded_shapes(self.table, items)
        arrays = checksums.name_leaves(items)
        content = {"meta": repr(meta).encode()}
        for name, array in arrays.items():
            slices = tuple(map(slice, unpadded[name].shape))
            content[name] = np.asarray(array)[slices].tobytes()
        return content

    def files(self) -> list[pathlib.Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file())

    def outcome(self, damage: Damage) -> str:
        """Restores the damaged checkpoint. Returns NOTICED, HARMLESS or SILENT."""
        with damage.applied():
            try:
                return HARMLESS if self.restore() == self.expected else SILENT
            except UserError:
                return NOTICED

    def kind(self, path: pathlib.Path) -> str:
        """Kind of a file: `master/d/0123abcd` is `master/d/*`."""
        return re.sub(r"[0-9a-f]{16,}", "*", str(path.relative_to(self.path)))


def random_damages(
    files: list[pathlib.Path], *, flips: int, truncations: int, seed: int
) -> Iterator[Damage]:
    """Draws damages: every other one hits each file, the rest each byte, with equal probability."""
    rng = np.random.default_rng(seed)
    files = [path for path in files if path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in files])
    for number in range(flips + truncations):
        probabilities = None if number % 2 else sizes / sizes.sum()
        path = files[rng.choice(len(files), p=probabilities)]
        size = path.stat().st_size
        if number < flips:
            yield Damage(path, "flip", int(rng.integers(8 * size)))
        else:
            yield Damage(path, "truncate", int(rng.integers(size)))


def main() -> int:
    """Prints the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.damage")
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--truncations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    sharding.MIN_SHARDED_SIZE = 100  # shards small models like large ones
    counts: collections.Counter = collections.Counter()
    sizes: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        saved = SavedRun(pathlib.Path(folder))
        files = saved.files()
        damages = random_damages(
            files, flips=args.flips, truncations=args.truncations, seed=args.seed
        )
        for damage in [*damages, *(Damage(path, "remove") for path in files)]:
            counts[saved.kind(damage.path), damage.kind, saved.outcome(damage)] += 1
        for path in files:
            sizes[saved.kind(path)] += path.stat().st_size
    headers = "".join(f" {outcome:>8}" for outcome in OUTCOMES)
    print(f"{'file':44} {'bytes':>9} {'damage':8}{headers}")
    totals: collections.Counter = collections.Counter()
    for file, kind in sorted({key[:2] for key in counts}):
        numbers = {outcome: counts[file, kind, outcome] for outcome in OUTCOMES}
        totals.update(numbers)
        columns = "".join(f" {number:>8}" for number in numbers.values())
        print(f"{file:44} {sizes[file]:>9,} {kind:8}{columns}")
    columns = "".join(f" {totals[outcome]:>8}" for outcome in OUTCOMES)
    print(f"{'all':44} {sum(sizes.values()):>9,} {'':8}{columns}")
    return int(totals[SILENT] > 0)


if __name__ == "__main__":
    sys.exit(main())
