"""Long-context fine-tuning of Hugging Face models in JAX."""

from jaxsp.runtime import plugin_messages

plugin_messages.load_quietly()  # before anything imports jax
