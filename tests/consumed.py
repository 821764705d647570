"""Trains like the command, and notes all that goes to the devices: `python -m tests.consumed LOG KILL_AT CONFIG.yaml ...`.

Each process appends to LOG.<process> a line for each step: the parts of the step's arrays that its devices hold.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import jax
import numpy as np

from jaxsp import cli, train
from jaxsp.data.packing.pipeline import BatchLoader


@contextlib.contextmanager
def noted(log: pathlib.Path, *, kill_at: int = 0) -> Iterator[None]:
    """Notes what Pipeline gives; the process kills itself when it is asked for step number `kill_at` of this start."""
    batches = BatchLoader.batches

    def recorded(self):
        file = log.with_name(f"{log.name}.{jax.process_index()}")
        for number, (given, counts) in enumerate(batches(self), 1):
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with file.open("a", encoding="utf-8") as out:
                out.write(
                    json.dumps(
                        {"number": number, "shape": given.tokens_BL.shape, "parts": parts(given)}
                    )
                    + "\n"
                )
            yield given, counts

    BatchLoader.batches = recorded
    try:
        yield
    finally:
        BatchLoader.batches = batches


def parts(given) -> list:
    """Where each part of tokens and labels that this process holds lies in the whole, and what it is."""
    found = {}
    for tokens, labels in zip(
        given.tokens_BL.addressable_shards, given.labels_BL.addressable_shards, strict=True
    ):
        place = tuple(
            part.indices(size)[0]
            for part, size in zip(tokens.index, given.tokens_BL.shape, strict=True)
        )
        found[place] = [place, np.asarray(tokens.data).tolist(), np.asarray(labels.data).tolist()]
    return list(found.values())


def read(log: pathlib.Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of each step of a start, put together from what all processes noted."""
    steps = {}
    for file in sorted(log.parent.glob(f"{log.name}.*")):
        for line in map(json.loads, file.read_text().splitlines()):
            tokens, labels = steps.setdefault(
                line["number"], [np.full(line["shape"], -1) for _ in range(2)]
            )
            for place, some_tokens, some_labels in line["parts"]:
                part = tuple(
                    slice(a, a + n) for a, n in zip(place, np.shape(some_tokens), strict=True)
                )
                assert np.all(tokens[part] == -1), "a cell is held by one process"
                tokens[part], labels[part] = some_tokens, some_labels
    assert all(np.all(tokens >= 0) for tokens, _ in steps.values()), (
        "every cell is held by some process"
    )
    return [tuple(steps[number]) for number in sorted(steps)]


if __name__ == "__main__":
    log, kill_at, *sys.argv[1:] = sys.argv[1:]
    with noted(pathlib.Path(log), kill_at=int(kill_at)):
        cli.run_command(train.main)
