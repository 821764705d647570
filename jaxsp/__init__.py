"""Long-context fine-tuning of Hugging Face models in JAX.

`jaxsp.Trainer` trains from Python, `jaxsp.plan` plans; they are imported when they are used, and
JAX with them.
"""

from typing import TYPE_CHECKING, Any

from jaxsp.system import jax_platform

if TYPE_CHECKING:
    from jaxsp.api import Trainer, plan

__all__ = ["Trainer", "plan"]

jax_platform.load_plugin_quietly()  # before anything imports jax


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jaxsp import api

        return getattr(api, name)
    raise AttributeError(f"module 'jaxsp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
