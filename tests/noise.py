"""Removes messages of libraries from the output of a command."""

import re

_ABSL = re.compile(
    r"(process \d+: )?"
    r"(WARNING: All log messages before absl::InitializeLog\(\)"
    r"|[IWE]\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\] )"
)


def without(output: str) -> list[str]:
    """Lines of the output, except those that JAX's CUDA plugin prints on import without a GPU.

    jax 0.10.1 prints them.
    """
    return [line for line in output.splitlines() if not _ABSL.match(line)]
