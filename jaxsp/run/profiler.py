"""Trace of some steps by JAX's profiler."""

import pathlib

import jax


class ProfilerTrace:
    """Trace of the steps `first` to `last`. Process 0 writes it; all start and stop it together."""

    def __init__(self, directory: pathlib.Path, steps: tuple[int, int] | None):
        self._directory = directory
        self._first, self._last = steps or (0, 0)
        self._is_running = False

    def __enter__(self) -> "ProfilerTrace":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_running:
            self.stop()

    def should_start(self, step: int) -> bool:
        """True if the trace starts before this step; no step may be running at its start."""
        return step == self._first

    def start(self) -> None:
        self._is_running = True
        if jax.process_index() == 0:
            jax.profiler.start_trace(str(self._directory))

    def should_stop(self, step: int) -> bool:
        """True if the trace ends after this step."""
        return self._is_running and step == self._last

    def stop(self) -> None:
        self._is_running = False
        if jax.process_index() == 0:
            jax.profiler.stop_trace()
