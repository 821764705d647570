"""Removes the messages of JAX plugins from the output of a command."""

import re

_ABSL = re.compile(
    r"(process \d+: )?"
    r"(WARNING: All log messages before absl::InitializeLog\(\)"
    r"|[IWE]\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\] )"
)


def remove_plugin_messages(output: str) -> list[str]:
    """Returns the lines of an output without those of JAX's CUDA plugin.

    The plugin of jax 0.10.1 prints them when it is imported on a machine without a GPU.
    """
    return [line for line in output.splitlines() if not _ABSL.match(line)]
