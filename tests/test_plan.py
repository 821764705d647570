"""jaxsp plan and `jaxsp.plan`, on models small enough to be compiled in seconds."""

import dataclasses
import json
import pathlib
import re

import jax
import pytest
import yaml

import jaxsp
from jaxsp import plan_cli
from jaxsp.core.errors import UserError
from jaxsp.hf import published
from jaxsp.planning import gpus, planner
from jaxsp.sharding import host_offload
from tests import messages, small_runs
from tests.planning import example_plans

REPO = pathlib.Path(__file__).parent.parent

MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2816,
}


@pytest.fixture
def run_plan(tmp_path, capsys):
    """Runs the command on a config of MODEL without data, and returns its output and JSON."""

    def run(*words):
        fields = small_runs.make_fields(
            tmp_path,
            "not-here.jsonl",
            model={"config": MODEL, "compute_dtype": "bfloat16"},
            mesh={"seq": 4},
            data={"row_tokens": 32768, "max_segments_per_row": 1},
            batch={"rows_per_step": 8},
        )
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
        plan_cli.main(
            [str(tmp_path / "config.yaml"), *words, "--json", str(tmp_path / "plan.json")]
        )
        return capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())

    return run


@pytest.fixture
def compiler():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_a_plan_from_python_is_that_of_the_command(run_plan, tmp_path):
    _, printed = run_plan("--devices", "4", "mesh.seq=2")
    changes = ["mesh.seq=2"]
    plan = dataclasses.asdict(jaxsp.plan(tmp_path / "config.yaml", changes, num_devices=4))
    plan = json.loads(json.dumps(plan))
    assert {name: printed[name] for name in plan} | {"plan_s": 0} == plan | {"plan_s": 0}


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_a_plan_has_memory_traffic_and_arithmetic_of_a_step(run_plan):
    printed, actual = run_plan()
    assert actual["fits"] is True
    assert actual["mesh"] == {"replica": 1, "data": 2, "seq": 4}, "a node of 8, since data is -1"
    assert sum(
        size for name, size in actual["memory"].items() if name != planner.RESERVED
    ) == pytest.approx(actual["device_gib"])
    assert actual["sent_bytes"] == sum(sent["bytes"] for sent in actual["collectives"])
    assert {(sent["kind"], *sent["axes"]) for sent in actual["collectives"]} >= {
        ("all-to-all", "seq"),
        ("all-gather", "data x seq"),
    }
    assert actual["hardware_flops"] > actual["model_flops"] > 0
    assert actual["tokens_per_s_estimate"] == pytest.approx(8 * 32768 / actual["step_s_estimate"])
    assert "8 x h100-80gb" in printed
    assert "ESTIMATE" in printed
    assert re.search(messages.containing(8, "GPUs", "2,000 GiB"), printed)
    words = " ".join(printed.split())
    assert re.search(messages.containing("save_attention_and_mlp", "8,192 tokens"), words)
    assert actual["mlp_tile_tokens"] == 8192
    assert actual["time_bottleneck"] in words
    tokens = 8 * 32768
    assert f"{tokens:,} tokens" in words, "of the config's one step"
    causes = ("matrix products", "attention", "memory bandwidth", "waiting for collectives")
    assert sum(actual["seconds_estimate"][cause] for cause in causes) == pytest.approx(
        actual["step_s_estimate"]
    )
    for sent in actual["collectives"]:
        assert 0 <= sent["waited_s"] <= sent["seconds"]
    exposed_s = sum(sent["waited_s"] for sent in actual["collectives"])
    assert exposed_s == pytest.approx(actual["seconds_estimate"]["waiting for collectives"])


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_an_offloaded_optimizer_is_in_host_memory_and_in_host_copies(run_plan):
    if jax.__version_info__ < host_offload.MIN_RELEASE:
        pytest.skip("arrays in host memory need jax 0.11.1 or later")
    words = (
        "memory.offload_optimizer=state_and_gradients",
        "optimizer.name=adamw",
        "mesh.seq=1",
        "--devices",
        "1",
    )
    _, actual = run_plan(*words, "batch.rows_per_step=1", "memory.offload_activations=layer_inputs")
    host = actual["host_memory"]
    weights = 4 * (2 * 4096 * 1024 + 4 * (1024 * 2560 + 3 * 1024 * 2816)) / 2**30
    assert host["weights"] == pytest.approx(weights, rel=0.01)
    assert host["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert host["saved activations"] == pytest.approx(4 * 32768 * 2 * 1024 / 2**30, rel=0.01)
    assert host["gradients"] > 0.5 * weights
    assert sum(host.values()) == pytest.approx(actual["host_gib"])
    assert min(actual["host_copy_bytes"]) > 3 * weights * 2**30, (
        "at least weights and moments, in both directions"
    )


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("strategy", "descriptions"),
    [
        ("all_gather", {"all_gather of 2 by 1"}),
        pytest.param(
            "auto", {"Ulysses of 2", "ring of 2", "all_gather of 2 by 1"}, marks=pytest.mark.slow
        ),
    ],
)
def test_every_mesh_is_planned_or_has_a_reason(run_plan, strategy, descriptions):
    printed, actual = run_plan(
        "--meshes",
        "--devices",
        "2",
        "batch.rows_per_step=1",
        "mesh.seq=1",
        f"attention.strategy={strategy}",
    )
    planned = [mesh for mesh in actual["meshes"] if mesh["plan"]]
    assert planned == actual["meshes"][: len(descriptions)]
    assert all(mesh["mesh"] == {"replica": 1, "data": 1, "seq": 2} for mesh in planned)
    assert {mesh["plan"]["strategy"] for mesh in planned} == descriptions
    seconds = [mesh["plan"]["step_s_estimate"] for mesh in planned]
    assert seconds == sorted(seconds)
    others = actual["meshes"][len(descriptions) :]
    assert len(others) == 2
    assert all(mesh["problem"].startswith("batch.rows_per_step = 1: ") for mesh in others)
    assert "estimates" in printed


def test_several_types_of_gpus_are_planned_in_one_call(run_plan, monkeypatch):
    """A refused type is listed; it is an error only if all are refused."""

    def plan_step(config, *, model, cluster, document_tokens):
        if cluster.device_type in refused:
            raise UserError(["data.row_tokens: too long", "and more"])
        return example_plans.make_plan(
            device_type=cluster.device_type,
            num_devices=cluster.num_devices,
            tokens_per_s_estimate=1e5,
        )

    monkeypatch.setattr(planner, "plan_step", plan_step)
    words = ["--device", "h100-80gb", "h200-141gb", "a100-80gb", "--tokens", "1e9"]
    refused = ["a100-80gb"]
    printed, actual = run_plan(*words)
    planned = ["h100-80gb", "h200-141gb"]
    assert [plan["device_type"] for plan in actual["plans"]] == planned
    lines = [line.split() for line in printed.splitlines() if line.split()[0] in gpus.GPUS]
    assert [device for device, *_ in lines] == planned
    assert lines[0][-1] == "22", "GPU-hours: 1e9 tokens are 10,000 s of 8 GPUs"
    assert "refused: 8 x a100-80gb: data.row_tokens: too long\n" in printed
    refused = list(gpus.GPUS)
    with pytest.raises(UserError, match=r"(?s)8 x h100-80gb: .*8 x a100-80gb"):
        run_plan(*words)


def test_the_steps_of_the_data_are_printed_and_give_the_cost(run_plan, tmp_path, monkeypatch):
    """3 rows of 32,768 tokens are one step."""
    lengths = [2000] * 20 + [30000]
    records = [json.dumps({"input_ids": [1] * length}) for length in lengths]
    (tmp_path / "records.jsonl").write_text("\n".join(records))

    def plan_step(config, *, model, cluster, document_tokens):
        return example_plans.make_plan(tokens_per_s_estimate=8 * 32768 / 3600)

    monkeypatch.setattr(planner, "plan_step", plan_step)
    words = [f"data.train=[{{source: {tmp_path / 'records.jsonl'}, format: tokens}}]"]
    words += ["data.row_tokens=32768", "data.max_segments_per_row=64"]
    words += ["--device", "h100-80gb", "h200-141gb"]
    printed, _ = run_plan(*words, "--data", "run.steps=null", "run.epochs=1")
    assert "21 documents" in printed
    assert "packed into 3 rows" in printed
    assert re.search("steps +1 step\n", printed)
    rows = [line.split() for line in printed.splitlines() if line.startswith("h100-80gb")]
    assert [row[-1] for row in rows] == ["8", "8"], "an hour of 8 GPUs"


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_auto_is_what_training_chooses_on_each_type_of_gpu(run_plan, monkeypatch):
    """Long rows need fewer GPUs with more memory."""
    degrees = {}

    def plan_step(config, *, model, cluster, document_tokens):
        degrees[cluster.device_type] = config.mesh.seq
        return example_plans.make_plan(device_type=cluster.device_type)

    monkeypatch.setattr(planner, "plan_step", plan_step)
    words = ["mesh.seq=auto", "data.row_tokens=4194304", "batch.rows_per_microbatch=auto"]
    printed, _ = run_plan(*words, "--device", "h100-80gb", "b200-180gb")
    assert degrees["h100-80gb"] > degrees["b200-180gb"] > 0
    for device, degree in degrees.items():
        assert f"mesh.seq = auto on 8 x {device}: {degree}\n" in printed
        assert f"batch.rows_per_microbatch = auto on 8 x {device}: 1\n" in printed


GATED = ("model.config=null", "model.source=meta-llama/Llama-3.1-8B")
"""The hub cannot be reached from tests."""


def test_published_sizes_are_reported_in_the_first_line_and_in_the_json(run_plan, monkeypatch):
    layers = []

    def plan_step(config, *, model, cluster, document_tokens):
        layers.append(model.num_layers)
        return example_plans.make_plan()

    monkeypatch.setattr(planner, "plan_step", plan_step)
    printed, actual = run_plan(*GATED)
    first = printed.splitlines()[0]
    sizes = published.read_models()["meta-llama/Llama-3.1-8B"]
    assert all(part in first for part in (sizes.name, "HF_HUB_OFFLINE", sizes.source))
    assert actual["published_sizes"] == first
    assert f"{sizes.name} (published sizes)" in " ".join(printed.split())
    printed, actual = run_plan()
    assert actual["published_sizes"] is None
    assert "published sizes" not in printed
    assert layers == [32, MODEL["num_hidden_layers"]]
