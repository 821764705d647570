"""Long-context fine-tuning of Hugging Face models in JAX.

`jaxsp.Trainer` trains from Python; it is imported when it is used, and JAX with it.
"""

from typing import TYPE_CHECKING, Any

from jaxsp.system import cuda_plugin

if TYPE_CHECKING:
    from jaxsp.api import Trainer

__all__ = ["Trainer"]

cuda_plugin.load_quietly()  # before anything imports jax


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from jaxsp.api import Trainer

        return Trainer
    raise AttributeError(f"module 'jaxsp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
