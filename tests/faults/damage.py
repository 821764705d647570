"""Flips bits of a checkpoint, cuts its files short and removes them, and looks whether a restore notices.

`python -m tests.faults.damage --flips 200 --truncations 20` prints a table by kind of file, and exits with 1 where a restore
gave another state and said nothing.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

import jax
import numpy as np
import rich.console

from jaxsp.checkpoint import checksums, reader
from jaxsp.config import config_file
from jaxsp.core.errors import UserError
from jaxsp.run import build, trainer
from jaxsp.training import sharding, train_step
from jaxsp.training.train_step import Program
from tests import batches

NOTICED, HARMLESS, SILENT = "noticed", "harmless", "silent"


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to a file."""

    path: pathlib.Path
    what: str
    at: int = 0

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        """The file as it is then, until the context ends."""
        whole = self.path.read_bytes()
        broken = bytearray(whole)
        if self.what == "flip":
            broken[self.at // 8] ^= 1 << self.at % 8
        self.path.write_bytes(broken[: self.at] if self.what == "cut" else broken)
        if self.what == "remove":
            self.path.unlink()
        try:
            yield
        finally:
            self.path.write_bytes(whole)


class Kept:
    """A checkpoint of a small run, and what is in it."""

    def __init__(self, folder: pathlib.Path):
        random = np.random.default_rng(0)
        records = [
            json.dumps({"input_ids": random.integers(0, 257, 64).tolist()}) for _ in range(8)
        ]
        (folder / "data.jsonl").write_text("\n".join(records), encoding="utf-8")
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
            "logging": {"tensorboard": False},
        }
        program, material = build.build_training(
            config_file.parse(fields), devices=jax.devices()[:8]
        )
        trainer.train(program, material, rich.console.Console(quiet=True))
        self.path = folder / "run/checkpoints/2"
        self.program, self.table, self.like = (
            program,
            program.table,
            train_step.abstract_inputs(program)[0],
        )
        self.right = self.found()

    def found(self, program: Program | None = None) -> dict[str, bytes]:
        """All that a restore gives, by name, without the zeros that fill up. Args: program: None: that of the run."""
        like = train_step.abstract_inputs(program)[0] if program else self.like
        meta = reader.read_meta(self.path)
        state = reader.restore(self.path, like, table=self.table, num_steps=meta.step)
        whole = checksums.name_leaves(
            checksums.unpadded_shapes(self.table, state.master, state.opt_state)
        )
        arrays = checksums.name_leaves({"master": state.master, "opt": state.opt_state})
        cut = {
            name: np.asarray(array)[tuple(map(slice, whole[name].shape))]
            for name, array in arrays.items()
        }
        return {name: array.tobytes() for name, array in cut.items()} | {
            "meta": repr(meta).encode()
        }

    def files(self) -> list[pathlib.Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file())

    def outcome(self, damage: Damage) -> str:
        with damage.done():
            try:
                return HARMLESS if self.found() == self.right else SILENT
            except UserError:
                return NOTICED

    def kind(self, path: pathlib.Path) -> str:
        """`master/d/0123abcd` is `master/d/*`."""
        return re.sub(r"[0-9a-f]{16,}", "*", str(path.relative_to(self.path)))


def random_damages(
    files: list[pathlib.Path], *, flips: int, truncations: int, seed: int
) -> Iterator[Damage]:
    """One half hits a file of any size, the other half any byte."""
    random = np.random.default_rng(seed)
    files = [path for path in files if path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in files])
    for number in range(flips + truncations):
        chances = None if number % 2 else sizes / sizes.sum()
        path = files[random.choice(len(files), p=chances)]
        size = path.stat().st_size
        yield (
            Damage(path, "flip", int(random.integers(8 * size)))
            if number < flips
            else Damage(path, "cut", int(random.integers(size)))
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.damage")
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--truncations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    sharding.MIN_SHARDED_SIZE = 100  # small models are sharded as large ones are
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(pathlib.Path(folder))
        files = kept.files()
        damages = [
            *random_damages(
                files, flips=given.flips, truncations=given.truncations, seed=given.seed
            )
        ]
        damages += [Damage(path, "remove") for path in files]
        counts: collections.Counter = collections.Counter()
        for damage in damages:
            counts[kept.kind(damage.path), damage.what, kept.outcome(damage)] += 1
        sizes = collections.Counter()
        for path in files:
            sizes[kept.kind(path)] += path.stat().st_size
    print(f"{'file':44} {'bytes':>9} {'done':8} {NOTICED:>8} {HARMLESS:>8} {SILENT:>8}")
    for kind, what in sorted({key[:2] for key in counts}):
        numbers = [counts[kind, what, outcome] for outcome in (NOTICED, HARMLESS, SILENT)]
        print(
            f"{kind:44} {sizes[kind]:>9,} {what:8} {numbers[0]:>8} {numbers[1]:>8} {numbers[2]:>8}"
        )
    totals = [
        sum(n for key, n in counts.items() if key[2] == outcome)
        for outcome in (NOTICED, HARMLESS, SILENT)
    ]
    print(
        f"{'all':44} {sum(sizes.values()):>9,} {'':8} {totals[0]:>8} {totals[1]:>8} {totals[2]:>8}"
    )
    return int(totals[2] > 0)


if __name__ == "__main__":
    sys.exit(main())
