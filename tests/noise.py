"""What a command says, without what libraries say unasked."""

import re

_ABSL = re.compile(
    r"(process \d+: )?(WARNING: All log messages before absl::InitializeLog\(\)|[IWE]\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\] )"
)


def without(said: str) -> list[str]:
    """The lines, without those that JAX's CUDA plugin prints on import where there is no GPU (jax 0.10.1)."""
    return [line for line in said.splitlines() if not _ABSL.match(line)]
