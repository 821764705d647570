"""jaxsp.Trainer in a loop of reinforcement learning: log-probabilities, trajectories, weights."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxsp
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config
from jaxsp.model import decoder
from tests import batches, commands, markdown, test_api, tolerances, two_processes
from tests.hf import oracle

FIELDS = test_api.SETTINGS | {
    "objective": {"type": "policy", "temperature": 0.7},
    "data": {"row_tokens": 32, "max_segments_per_row": 4},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "base"
    test_api.make_folder(path)
    return path


@pytest.fixture(scope="module")
def trainer(base):
    return make_trainer(base)


def make_trainer(base, **sections):
    fields = FIELDS | sections
    return jaxsp.Trainer(fields | {"model": fields["model"] | {"source": str(base)}})


def draw_documents(*lengths):
    rng = np.random.default_rng(5)
    return [rng.integers(0, 257, length).tolist() for length in lengths]


def make_record(document, **fields):
    num_prompt = len(document) // 2
    num_sampled = len(document) - num_prompt
    record = {
        "input_ids": document,
        "loss_mask": [0] * num_prompt + [1] * num_sampled,
        "advantages": 1.0,
        "old_logps": [-5.0] * num_sampled,
    }
    return record | fields


def test_log_probabilities_are_those_of_transformers(trainer, base):
    transformers = pytest.importorskip("transformers")
    torch = oracle.torch
    documents = draw_documents(9, 2, 31, 32)
    actual = trainer.logps(documents)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for document, logps in zip(documents, actual, strict=True):
        tokens = torch.tensor(document)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / 0.7
        right = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        assert logps.dtype == np.float32
        assert (len(logps), logps[0]) == (len(document), 0)
        assert batches.relative_error(logps[1:], right.numpy()) < tolerances.EVAL


def test_documents_that_a_row_does_not_hold_have_no_log_probabilities(trainer):
    for length in (1, 33):
        with pytest.raises(UserError, match=rf"documents\[1\]: has {length} token"):
            trainer.logps(draw_documents(5, length))


def test_each_trajectory_is_used_once_in_steps_of_one_shape(trainer):
    records = [make_record(document) for document in draw_documents(*[20] * 6, 7, 9)]
    made = [*trainer.pack(records)]
    assert len(made) == 2
    lengths = np.concatenate([np.asarray(batch.lengths_BM).ravel() for batch in made])
    assert sorted(lengths[lengths > 0]) == [7, 9, *[20] * 6]
    shapes = [jax.tree.map(jnp.shape, batch) for batch in made]
    assert shapes[0] == shapes[1], "rows that remain are empty"
    assert len([*trainer.pack(records, epochs=3)]) > 3


def test_records_that_do_not_fit_are_refused(trainer, base):
    (document,) = draw_documents(9)
    with pytest.raises(UserError, match=r"documents\[1\]: old_logps has 2 numbers"):
        trainer.pack([make_record(document), make_record(document, old_logps=[-1, -2])])
    with pytest.raises(UserError, match=r"documents\[0\]: has no advantages; .*\. Compute adv"):
        trainer.pack([{"input_ids": document, "reward": 1.0}])
    with pytest.raises(UserError, match=r"documents\[0\]: is a list, not a record"):
        trainer.pack([document])
    with pytest.raises(UserError, match="labels"):
        trainer.pack([make_record(document)], labels=[document])
    with pytest.raises(UserError, match=r"long_documents = split.*Use drop"):
        trainer.pack([make_record(*draw_documents(33))])
    fields = FIELDS | {"model": FIELDS["model"] | {"source": str(base)}}
    with pytest.raises(UserError, match="has_weights"):
        jaxsp.Trainer(fields, has_weights=True)


def test_bad_records_are_left_out_if_the_config_says_so(base):
    data = FIELDS["data"] | {"on_bad_record": "skip", "max_bad_records": 1}
    trainer = make_trainer(base, data=data)
    documents = draw_documents(9, 8)
    good = make_record(documents[0])
    bad = make_record(documents[1], old_logps=[-1])
    (batch,) = trainer.pack([bad, good])
    assert np.asarray(batch.lengths_BM).sum() == 9
    with pytest.raises(UserError, match="max_bad_records"):
        trainer.pack([bad, good, bad])


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_weights_for_an_engine_are_those_that_are_saved(adapter, base, tmp_path):
    trainer = make_trainer(base, adapter={"type": adapter})
    trainer.save(tmp_path / "out", dtype="float32")
    right = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    shards = [*trainer.weights(max_bytes=150_000)]
    assert len(shards) > 2
    for shard in shards:
        assert len(shard) == 1 or sum(array.nbytes for array in shard.values()) <= 150_000
    given = {name: array for shard in shards for name, array in shard.items()}
    assert sum(map(len, shards)) == len(given) == len(right)
    assert batches.is_bitwise_equal(given, right)
    first = next(trainer.weights(dtype="bfloat16"))
    assert {array.dtype.name for array in first.values()} == {"bfloat16"}
    table = decoder.param_table(model_config.parse_model_config(test_api.FIELDS))
    assert table["embedding"].hf_name in first


@pytest.mark.e2e
def test_the_script_of_the_page_learns_its_reward(tmp_path):
    """The blocks of configs/guide/policy.md, as they stand there, on four CPU devices."""
    page = (commands.REPO / "configs/guide/policy.md").read_text(encoding="utf-8")
    blocks = markdown.code_blocks(page, "python")
    script = "\n".join([*blocks, "import json\nprint(json.dumps([rewards, num_bytes]))"])
    test_api.make_folder(tmp_path / "models/base", batches.SMALL_LLAMA)
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(commands.REPO)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rewards, num_bytes = json.loads(done.stdout.splitlines()[-1])
    assert rewards[0] < 0.6
    assert min(rewards[-5:]) > 0.9
    saved = safetensors.numpy.load_file(tmp_path / "models/base/model.safetensors")
    assert num_bytes == sum(array.nbytes for array in saved.values()) / 2


SCRIPT = """
import json
import sys

import jax

import jaxsp

config, documents = json.loads(sys.argv[1])
trainer = jaxsp.Trainer(config)
records = [
    {"input_ids": x, "loss_mask": [1] * len(x), "advantages": 1 / len(x), "old_logps": y.tolist()}
    for x, y in zip(documents, trainer.logps(documents))
]
losses = [float(trainer.step(batch)["loss"]) for batch in trainer.pack(records)]
bad = [records[0] | {"old_logps": []}, *records[1:]]  # in process 1 only
for given in (records[jax.process_index() :], bad if jax.process_index() else records):
    try:
        trainer.pack(given)
    except jaxsp.core.errors.UserError as error:
        print(error)
sums = {name: float(abs(x).sum()) for shard in trainer.weights() for name, x in shard.items()}
print(json.dumps([losses, [x["old_logps"] for x in records], sums]))
"""


@pytest.mark.e2e
def test_two_processes_have_the_results_of_one(base):
    fields = FIELDS | {"model": FIELDS["model"] | {"source": str(base)}}
    fields["optimizer"] = {"name": "sgd", "learning_rate": 0.1}
    documents = draw_documents(20, 9, 14, 30, 8)

    fields["mesh"] = fields["mesh"] | {"virtual_cpu_devices": 8}
    arguments = ("-c", SCRIPT, json.dumps([fields, documents]))
    one = commands.run_python(*arguments)
    outputs = [one.stdout, *(x for x, _ in two_processes.wait(two_processes.start(*arguments)))]
    right, *made = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert made[0] == made[1], "every process has everything"
    assert [output.count("Pass the same list in each process.") for output in outputs] == [0, 2, 2]
    for actual, expected in zip(jax.tree.leaves(made[0]), jax.tree.leaves(right), strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
