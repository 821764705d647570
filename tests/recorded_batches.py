"""Trains like the command and records the batches.

Usage: `python -m tests.recorded_batches LOG KILL_AT CONFIG.yaml ...`. Each process appends a line
per step to LOG.<process>, with the shards that its devices hold.
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
from jaxsp.data.loader import BatchLoader


@contextlib.contextmanager
def record_batches(log: pathlib.Path, *, kill_at: int = 0) -> Iterator[None]:
    """Records batches, and kills the process before its batch number `kill_at`; 0: never."""
    batches = BatchLoader.batches

    def recording(self):
        file = log.with_name(f"{log.name}.{jax.process_index()}")
        for number, (batch, counts) in enumerate(batches(self), 1):
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            record = {"number": number, "shape": batch.tokens_BL.shape, "shards": shards(batch)}
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
            yield batch, counts

    BatchLoader.batches = recording
    try:
        yield
    finally:
        BatchLoader.batches = batches


def shards(batch) -> list:
    """First index, tokens and labels of each distinct shard that this process holds."""
    shards = {}
    shape = batch.tokens_BL.shape
    pairs = zip(batch.tokens_BL.addressable_shards, batch.labels_BL.addressable_shards, strict=True)
    for tokens, labels in pairs:
        first = tuple(
            index.indices(size)[0] for index, size in zip(tokens.index, shape, strict=True)
        )
        shards[first] = [first, np.asarray(tokens.data).tolist(), np.asarray(labels.data).tolist()]
    return list(shards.values())


def read_batches(log: pathlib.Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of each step, joined from the records of all processes."""
    steps = {}
    for file in sorted(log.parent.glob(f"{log.name}.*")):
        for line in map(json.loads, file.read_text().splitlines()):
            tokens, labels = steps.setdefault(
                line["number"], [np.full(line["shape"], -1) for _ in range(2)]
            )
            for first, shard_tokens, shard_labels in line["shards"]:
                shape = np.shape(shard_tokens)
                index = tuple(slice(a, a + n) for a, n in zip(first, shape, strict=True))
                assert np.all(tokens[index] == -1), "two processes hold the same cell"
                tokens[index] = shard_tokens
                labels[index] = shard_labels
    is_complete = all(np.all(tokens >= 0) for tokens, _ in steps.values())
    assert is_complete, "no process holds a cell"
    return [tuple(steps[number]) for number in sorted(steps)]


if __name__ == "__main__":
    log, kill_at, *sys.argv[1:] = sys.argv[1:]
    with record_batches(pathlib.Path(log), kill_at=int(kill_at)):
        cli.run_command(train.main)
