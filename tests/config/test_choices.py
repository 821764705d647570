"""A choice is a class in one file: its fields, checks, help and behavior."""

import functools
import json
from typing import Annotated, ClassVar, Literal

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest

from jaxsp.config import config_file
from jaxsp.config.config_errors import Schema
from jaxsp.config.fields import Choice
from jaxsp.core.errors import UserError
from jaxsp.data.data_config import FORMATS, DataConfig
from jaxsp.data.plain import Text
from jaxsp.data.source import Source
from jaxsp.objectives.objective import LENGTH, Objective, Sft, TokenObjective
from jaxsp.objectives.pairs import PairObjective
from jaxsp.objectives.registry import OBJECTIVES
from jaxsp.optimizers.registry import OPTIMIZERS, Optimizer
from jaxsp.optimizers.schedules import SCHEDULES, Cosine, Schedule
from jaxsp.run.config_file import Config
from jaxsp.run.run_directory import Trackers
from jaxsp.run.trackers import TRACKERS, Client, LoggingConfig, Tracker
from jaxsp.tasks.task import Task
from jaxsp.tasks.tasks import TASKS, EvalConfig
from jaxsp.training import step_gradients
from tests import batches, tolerances
from tests.data import source_configs
from tests.training import runs, test_policy, test_preferences


class Halving(Schedule):
    """Halves."""

    type: Literal["halving"] = "halving"
    every: int = 2
    """Steps."""

    def make_rate(self, peak, *, num_steps, num_warmup_steps):
        return lambda step: peak * 0.5 ** (step // self.every)


class Signs(Optimizer):
    """Signs of the gradient."""

    name: Literal["signs"] = "signs"
    schedule: Annotated[
        Schedule, Choice(selector="type", types=(*SCHEDULES, Halving), is_name=True)
    ] = Cosine()
    factor: float = 1.0
    """Factor of the signs."""

    def find_problems(self):
        if self.factor == 0:
            yield f"{self.show('factor')}: must not be 0."

    def make_transform(self):
        return optax.stateless(lambda g, _: self.factor * jnp.sign(g))


class Length(PairObjective):
    """Lengths."""

    type: Literal["length"] = "length"
    power: float = 1.0
    """Power of the number of tokens."""

    def losses(self, pairs):
        return pairs.counts_P2.sum(1) ** self.power

    def rewards(self, pairs):
        return pairs.counts_P2


class Spread(TokenObjective):
    """Losses that are divided by the tokens of a document, times a power of a number."""

    type: Literal["spread"] = "spread"
    is_by_document: ClassVar[bool] = True
    needs: ClassVar = ("advantages",)
    power: float = 2.0
    """Power of the number."""

    def losses(self, tokens):
        factors_X = tokens.numbers["advantages"] ** self.power / tokens.numbers[LENGTH]
        losses_X = -tokens.logps_X * factors_X
        return losses_X, {"entropy": losses_X}

    def find_divisor(self, counts):
        return counts["num_trajectories"]


class Parity(Task):
    """Parity."""

    task: Literal["parity"] = "parity"
    factor: int = 1
    """Factor of the answer."""

    def make_sample(self, parts, random, *, max_tokens, depth):
        return parts.start("Odd?"), parts.after_word(f" {self.factor * max_tokens % 2}")


class OwnEvalConfig(EvalConfig):
    """Evaluations."""

    tasks: Annotated[
        tuple[Annotated[Task, Choice(selector="task", types=(*TASKS, Parity))], ...],
        pydantic.Field(strict=False),
    ] = ()


class Lines(Tracker):
    """Lines."""

    type: Literal["lines"] = "lines"
    file_name: str = "lines"
    """Name of the file."""

    def start(self, run):
        return LinesClient(run.directory / self.file_name)


class LinesClient(Client):
    def __init__(self, path):
        self.path = path

    def log(self, numbers, step):
        self.path.write_text(f"{step} {numbers}")

    def close(self, outcome):
        assert outcome == "finished"


class OwnLoggingConfig(LoggingConfig):
    """Logs."""

    trackers: Annotated[
        tuple[
            Annotated[Tracker, Choice(selector="type", types=(*TRACKERS, Lines), is_name=True)], ...
        ],
        pydantic.Field(strict=False),
    ] = ()


class Fact(Text):
    """`question` and `answer`, as one text."""

    format: Literal["fact"] = "fact"
    separator: str = ": "
    """Text between them."""
    required: ClassVar = ("question", "answer")
    input_field: ClassVar = None

    def check(self, record):
        return {self.column: f"{record.get('question')}{self.separator}{record.get('answer')}"}


class OwnDataConfig(DataConfig):
    """Data."""

    train: Annotated[
        tuple[Annotated[Source, Choice(selector="format", types=(*FORMATS, Fact))], ...],
        pydantic.Field(strict=False),
    ] = ()


class OwnConfig(Config):
    """A config with the choices of this file."""

    data: OwnDataConfig

    optimizer: Annotated[Optimizer, Choice(selector="name", types=(*OPTIMIZERS, Signs))]
    objective: Annotated[
        Objective, Choice(selector="type", types=(*OBJECTIVES, Length, Spread), default="sft")
    ] = Sft()
    eval: OwnEvalConfig = OwnEvalConfig()
    logging: OwnLoggingConfig = OwnLoggingConfig()


SCHEMA = Schema(OwnConfig)

FIELDS = {
    "run": {"directory": "x", "steps": 3},
    "model": {"config": {}},
    "data": {"train": [{"source": "x", "format": "preference"}], "row_tokens": 8},
    "batch": {"rows_per_step": 8},
    "optimizer": {"name": "signs", "learning_rate": 2, "factor": 3, "schedule": "halving"},
    "objective": {"type": "length"},
}


def test_one_class_adds_an_optimizer_or_a_schedule():
    config = config_file.parse(SCHEMA, FIELDS, ["optimizer.schedule.every=3"])
    assert [float(config.optimizer.make_rate(9)(step)) for step in (2, 3)] == [2, 1]
    transform = config.optimizer.make_matrix_transform()
    updates, _ = transform.update(jnp.float32([-5]), transform.init(jnp.ones(1)), jnp.ones(1))
    assert updates == -3


def test_one_class_adds_an_objective():
    config = config_file.parse(SCHEMA, FIELDS)
    pairs = test_preferences.make_pairs([[0, -5]], counts=2.0)
    assert config.objective.compute_losses(pairs) == 4


def test_one_class_adds_an_objective_of_tokens():
    """Its divisor, the numbers of tokens and metrics are those that it declares."""
    own = {"objective": {"type": "spread", "power": 3}}
    objective = config_file.parse(SCHEMA, FIELDS | own, ["data.train.0.format=trajectories"])
    spec = test_policy.make_spec(test_policy.Case((1, 1, 4), "dapo", {}))
    spec = spec.respec(objective=objective.objective)
    drawn = test_policy.draw_for_model()
    batch = test_policy.only_batch(spec, drawn)
    master = runs.put_weights(spec.table, test_policy.WEIGHTS, spec.mesh)
    _, results = jax.jit(functools.partial(step_gradients.compute_gradients, spec))(master, batch)
    logps_NLV = jax.nn.log_softmax(test_policy.compute_logits(drawn))
    labels_NL = drawn.tokens_NL[:, 1:, None]
    logps_NL = jnp.take_along_axis(logps_NLV[:, :-1], labels_NL, axis=-1)[..., 0]
    has_loss_NL = drawn.has_loss_NL[:, 1:]
    losses_NL = -logps_NL * drawn.numbers["advantages"][:, 1:] ** 3
    own_NL = np.where(has_loss_NL, losses_NL, 0) / has_loss_NL.sum(1, keepdims=True)
    for actual, expected in (
        (results["loss"], own_NL.sum() / len(own_NL)),
        (results["entropy"], own_NL.sum() / has_loss_NL.sum()),
    ):
        assert batches.relative_error(actual, expected) < tolerances.MESH


def test_a_format_of_records_is_a_class(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    lines = [{"question": "1 + 1?", "answer": "2"}, {"question": "Why?"}, {"images": [1], "a": 2}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    changes = [f"data.train=[{{source: {tmp_path}/a.jsonl, format: fact}}]"]
    changes = [*changes, "data.on_bad_record=skip", "data.train.0.separator=' = '"]
    data = config_file.parse(SCHEMA, FIELDS | {"objective": {"type": "sft"}}, changes).data
    read = source_configs.read(data.train[0], data=data)
    assert read["text"][:] == ["1 + 1? = 2", "", ""]
    other = data.train[0].model_copy(update={"separator": " is "})
    assert source_configs.read(other, data=data)["text"][0] == "1 + 1? is 2", (
        "not the cached records"
    )
    assert read["problem"][1:] == [
        "has no answer; it has question.",
        "has no question; it has a, images.",
    ]
    with pytest.raises(UserError) as caught:
        config_file.parse(SCHEMA, FIELDS, [changes[0], "data.train.0.fields={answr: a}"])
    assert "fields: format fact has no answr. Use question or answer." in str(caught.value)


def test_an_evaluation_task_is_a_class():
    changes = ["eval.tasks=[{task: parity, lengths: [9], samples: 2}]", "eval.tasks.0.factor=3"]
    (task,) = config_file.parse(SCHEMA, FIELDS, changes).eval.tasks
    made = task.make_samples(lambda text: [*text.encode()], length=9)
    assert [bytes(sample.answer_ids.tolist()) for sample in made] == [b" 1", b" 1"]


def test_a_tracker_is_a_class_named_or_with_its_fields(tmp_path):
    changes = [f"run.directory={tmp_path}", "logging.trackers=[lines]"]
    config = config_file.parse(SCHEMA, FIELDS, [*changes, "logging.trackers.0.file_name=out"])
    with Trackers(config, from_step=0, is_resume=False) as trackers:
        trackers.log({"step": 1, "loss": 2})
    assert (tmp_path / "out").read_text() == "1 {'train/loss': 2.0}"
    assert config_file.parse(SCHEMA, FIELDS, changes).logging.trackers == (Lines(),)


def test_the_help_and_the_errors_of_a_choice_come_from_its_class():
    text = SCHEMA.describe_fields(["optimizer"])
    assert "signs: Signs of the gradient." in text
    assert "Only for signs. Factor of the signs." in text
    changes = ["optimizer.factor=0", "objective.beta=1", "objective.powr=2"]
    with pytest.raises(UserError) as caught:
        config_file.parse(SCHEMA, FIELDS, changes)
    problems = caught.value.problems
    assert problems[0].startswith("objective.beta = 1: must be null, because length does not have")
    assert problems[1:] == [
        "objective.powr = 2: unknown. Did you mean objective.power?",
        "optimizer.factor = 0.0: must not be 0.",
    ]
    with pytest.raises(UserError, match=r"optimizer.name = sign: must be .*optimizer.name=signs"):
        config_file.parse(SCHEMA, FIELDS, ["optimizer.name=sign"])


def test_momentum_changes_the_state_of_sgd():
    kinds = [
        batches.make_config(**options).optimizer.state_kind
        for options in ({}, {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.5})
    ]
    assert kinds == ["sgd", "sgd", "sgd with momentum", "sgd with momentum"]
