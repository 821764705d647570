"""`jaxsp.Trainer`: fine-tuning from Python in a few lines, over the functions of `jaxsp.library`.

Example:
    import jaxsp
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained("models/base")
    texts = open("texts.txt").readlines()
    documents = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    config = {
        "run": {"steps": 10},
        "mesh": {"seq": 4},  # four devices share each row
        "data": {"row_tokens": 512},
        "batch": {"rows_per_step": 8},
        "optimizer": {"learning_rate": 1e-2},
    }
    trainer = jaxsp.Trainer("models/base", config)
    for batch in trainer.pack(documents[8:]):
        metrics = trainer.step(batch)
        print(int(trainer.state.step), float(metrics["loss"]))
    print(trainer.evaluate(documents[:8])["loss"])
    trainer.save("models/tuned")
"""

import pathlib
from collections.abc import Callable, Iterator

from jaxsp import library
from jaxsp.core.batch import Batch
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.library import ConfigFields, NumberLists
from jaxsp.memory import memory_compile
from jaxsp.training import train_state
from jaxsp.training.loss import TokenLoss
from jaxsp.training.metric_table import Line
from jaxsp.training.train_state import TrainState
from jaxsp.training.train_step import StepResults


class Trainer:
    """A model on a device mesh, its optimizer state, and the step that trains it.

    The numbers are those of `jaxsp train` with the same config and rows. For another loop, use
    `trainer.spec` and `trainer.state` with the functions of `jaxsp.library`.

    Example: see the top of the file.
    """

    def __init__(
        self,
        model_source: str,
        config: ConfigFields,
        *,
        loss: TokenLoss | None = None,
        has_weights: bool = False,
    ):
        """Loads the model; compiles nothing. Args and Raises: see `library.load_model`."""
        spec, weights = library.load_model(model_source, config, loss=loss, has_weights=has_weights)
        self.spec = spec
        self.state = train_state.init_state(spec, weights)
        self._step: Callable[[TrainState, Batch], tuple[TrainState, StepResults]] | None = None
        self._evaluator = Evaluator(spec, ())

    def pack(
        self,
        documents: NumberLists,
        *,
        labels: NumberLists | None = None,
        weights: NumberLists | None = None,
    ) -> Iterator[Batch]:
        """Packs token ids into the batches of run.steps steps. See `library.pack`."""
        return library.pack(documents, self.spec, labels=labels, weights=weights)

    def step(self, batch: Batch) -> StepResults:
        """Trains on a batch. Its metrics are arrays by name; reading one waits for the step.

        Compiles at the first batch, with the memory options that fit.
        Raises: UserError if the step does not fit the devices.
        """
        if self._step is None:
            self._step = memory_compile.compile_fitting_step(self.spec).executable
        self.state, metrics = self._step(self.state, batch)
        return metrics

    def evaluate(
        self, documents: NumberLists, *, labels: NumberLists | None = None, name: str = "eval"
    ) -> Line:
        """Numbers of a line of eval.jsonl for these weights. Compiles at the first call."""
        data = library.pack_once(documents, self.spec, labels=labels, name=name)
        return self._evaluator.evaluate(data, self.state.master, num_steps=int(self.state.step))

    def save(self, directory: str | pathlib.Path) -> None:
        """Saves a Hugging Face folder, with adapters merged. See `library.save_model`."""
        library.save_model(self.state.master, directory, self.spec)
