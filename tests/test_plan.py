"""python -m jaxsp.plan, on models small enough to be compiled in seconds."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
import yaml

from jaxsp import benchmark, plan
from jaxsp.config import config_file
from jaxsp.core import exit_codes
from jaxsp.core.errors import UserError
from jaxsp.hf import published
from jaxsp.planner import planning, search
from jaxsp.planner.compile import gpus, memory
from jaxsp.run import benchmark as run_benchmark
from jaxsp.run import mesh_benchmark
from jaxsp.training import memory_fit, memory_options
from tests import messages
from tests.planner import made

REPO = pathlib.Path(__file__).parent.parent

KEYS = (
    "fits",
    "device_gib",
    "host_gib",
    "memory",
    "sent_bytes",
    "formula_bytes",
    "step_s_estimate",
    "row_tokens",
    "mesh",
    "remat",
)

MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2816,
}


NEEDS_MATPLOTLIB = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="pictures need the plan extra"
)


@pytest.fixture
def asked(tmp_path, capsys):
    """Asks the command about a config with this model, without any data; gives what it said and the JSON."""

    def ask(*words):
        fields = {
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": MODEL},
            "mesh": {"seq": 4},
            "data": {
                "train": [{"source": "not-here.jsonl", "format": "text"}],
                "row_tokens": 32768,
                "max_segments_per_row": 1,
            },
            "batch": {"rows_per_step": 8},
            "optimizer": {"learning_rate": 0.1},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
        plan.main([str(tmp_path / "config.yaml"), *words, "--json", str(tmp_path / "plan.json")])
        return capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())

    return ask


@pytest.fixture
def compiler():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_a_plan_says_what_a_step_takes_sends_and_computes(asked):
    said, found = asked()
    assert set(KEYS) <= found.keys()
    assert found["fits"] is True
    assert found["mesh"] == {"replica": 1, "data": 2, "seq": 4}, "a node of 8, since data is -1"
    assert sum(
        size for name, size in found["memory"].items() if name != memory.RESERVED
    ) == pytest.approx(found["device_gib"])
    assert found["sent_bytes"] / found["formula_bytes"] == pytest.approx(1, abs=1e-4)
    assert {(one["kind"], *one["axes"]) for one in found["collectives"]} >= {
        ("all-to-all", "seq"),
        ("all-gather", "data x seq"),
    }
    assert all(
        one["bytes"] / one["formula"] == pytest.approx(1, abs=0.01) for one in found["collectives"]
    )
    assert found["hardware_flops"] > found["model_flops"] > 0
    assert found["tokens_per_s_estimate"] == pytest.approx(8 * 32768 / found["step_s_estimate"])
    assert "8 x h100-80gb" in said
    assert "ESTIMATE" in said
    assert re.search(messages.holding(8, "GPUs", "2,000 GiB"), said)
    words = " ".join(said.split())
    assert re.search(messages.holding("save_attention_and_mlp", "8,192 tokens"), words)
    assert found["mlp_tile_tokens"] == 8192
    assert found["time_bottleneck"] in words
    tokens = 8 * 32768
    assert f"{tokens:,} tokens" in words, "of the config's one step"
    causes = ("matrix products", "attention", "memory bandwidth", "waiting for collectives")
    assert sum(found["seconds_estimate"][cause] for cause in causes) == pytest.approx(
        found["step_s_estimate"]
    )
    for one in found["collectives"]:
        of_kind = [
            transfer for transfer in found["transfers"] if transfer["operation"] == one["kind"]
        ]
        assert one["seconds"] == pytest.approx(sum(transfer["seconds"] for transfer in of_kind))
        assert 0 <= one["waited_s"] <= one["seconds"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("device", ["a100-80gb", "h200-141gb", "b200-180gb"])
def test_every_device_is_compiled_for(asked, device):
    said, found = asked("--device", device, "mesh.seq=2", "--devices", "2")
    assert found["fits"] is True
    assert found["device_type"] == device
    assert found["kernel"] == "cudnn"
    assert found["device_limit_gib"] + found["memory"][memory.RESERVED] == pytest.approx(
        gpus.GPUS[device].memory_bytes / 2**30
    )
    assert f"2 x {device}" in said


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("--device", "a100-80gb", "data.max_segments_per_row=64"), marks=pytest.mark.slow
        ),
        ("model.compute_dtype=float32",),
    ],
    ids=["A100", "float32"],
)
def test_where_cudnn_does_not_serve_there_is_a_plan_without_an_estimate(asked, words):
    said, found = asked(*words, "data.row_tokens=8192")
    assert found["kernel"] == "blockwise"
    assert found["fits"] is True
    assert found["step_s_estimate"] is found["hardware_flops"] is None
    assert found["sent_bytes"] / found["formula_bytes"] == pytest.approx(1, abs=1e-3)
    assert re.search(messages.holding("blockwise", "cuDNN"), " ".join(said.split()))
    assert "ESTIMATE" not in said


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_an_offloaded_optimizer_is_the_host_s_by_cause_and_in_what_travels(asked):
    if jax.__version_info__ < memory_options.MIN_HOST_STATE_RELEASE:
        pytest.skip("arrays in host memory need jax 0.11.1 or later")
    words = (
        "memory.offload_optimizer=state_and_gradients",
        "optimizer.name=adamw",
        "mesh.seq=1",
        "--devices",
        "1",
    )
    _, found = asked(*words, "batch.rows_per_step=1", "memory.offload_activations=layer_inputs")
    host = found["host_memory"]
    weights = 4 * (2 * 4096 * 1024 + 4 * (1024 * 2560 + 3 * 1024 * 2816)) / 2**30
    assert host["weights"] == pytest.approx(weights, rel=0.01)
    assert host["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert host["residuals"] == pytest.approx(4 * 32768 * 2 * 1024 / 2**30, rel=0.01)
    assert host["gradients"] > 0.5 * weights
    assert sum(host.values()) == pytest.approx(found["host_gib"])
    assert min(found["host_copy_bytes"]) > 3 * weights * 2**30, (
        "weights and averages at least, there and back"
    )


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_what_cannot_fit_says_what_is_full_and_what_to_try(asked):
    said, found = asked("data.row_tokens=16777216", "memory.remat=save_attention")
    assert found["fits"] is False
    assert found["memory_bottleneck"] == "device"
    assert "memory.remat=auto" in found["suggestions"]
    assert "memory.offload_activations=layer_inputs" in " ".join(said.split())
    assert "batch.rows_per_step=2" in found["suggestions"], "a microbatch of the 2 groups"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_what_is_offloaded_is_the_host_s_and_the_host_may_bind(asked):
    said, found = asked(
        "memory.offload_activations=layer_inputs_and_attention",
        "--host-gib",
        "1",
        "data.row_tokens=1048576",
    )
    assert found["host_memory"].keys() == {memory.SAVED_ACTIVATIONS}
    of_device = 4 * 1048576 // 4 * (2 * 1024 + 2 * 1024 + 4 * 8)
    assert found["host_gib"] == pytest.approx(8 * of_device / 2**30, rel=0.01)
    assert found["memory_bottleneck"] == "host"
    assert found["fits"] is False
    assert found["host_copy_bytes"] == pytest.approx([4 * of_device] * 2, rel=0.01), (
        "each of 4 microbatches, there and back"
    )
    assert "host memory" in said


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_a_plan_that_should_offload_and_does_not_is_our_error(asked, monkeypatch):
    real = memory_fit.read_memory_use
    monkeypatch.setattr(
        memory_fit,
        "read_memory_use",
        lambda *given, **named: real(*given, **named)._replace(host=0),
    )
    with pytest.raises(RuntimeError, match="XLA"):
        asked("memory.offload_activations=layer_inputs")


@pytest.mark.slow  # the search has tests of its own, in planner/
@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_the_longest_row_fits_and_is_drawn(asked, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the plan extra")
    picture = tmp_path / "picture.png"
    said, found = asked(
        "--longest", "mesh.seq=1", "--devices", "1", "batch.rows_per_step=1", "--plot", str(picture)
    )
    assert found["fits"] is True
    assert found["row_tokens"] == found["longest_row_tokens"]
    beyond = next(one["row_tokens"] for one in found["tried"] if not one["fits"])
    assert beyond - found["row_tokens"] <= max(
        search.PRECISION * found["row_tokens"], search.LENGTH_UNIT
    )
    assert found["device_gib"] > 0.95 * found["device_limit_gib"]
    assert f"{found['row_tokens']:,} tokens" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("all_gather", {"all_gather of 2 by 1"}),
        pytest.param(
            "auto", {"Ulysses of 2", "ring of 2", "all_gather of 2 by 1"}, marks=pytest.mark.slow
        ),
    ],
)
def test_every_mesh_is_planned_and_those_that_cannot_be_say_why(asked, kind, words):
    said, found = asked(
        "--meshes",
        "--devices",
        "2",
        "batch.rows_per_step=1",
        "mesh.seq=1",
        f"attention.strategy={kind}",
    )
    planned = [one for one in found["meshes"] if one["plan"]]
    assert planned == found["meshes"][: len(words)]
    assert all(one["mesh"] == {"replica": 1, "data": 1, "seq": 2} for one in planned)
    assert {one["plan"]["strategy"] for one in planned} == words
    seconds = [one["plan"]["step_s_estimate"] for one in planned]
    assert seconds == sorted(seconds)
    others = found["meshes"][len(words) :]
    assert len(others) == 2
    assert all(one["problem"].startswith("batch.rows_per_step = 1: ") for one in others)
    assert "estimates" in said


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device", "h100"], ["--device = h100", "mean h100-80gb"]),
        (["--devices", "0"], ["--devices = 0"]),
        (["--devices", "12", "--node-devices", "8"], ["--node-devices = 8", 12, "1, 2, 3, 4, 6"]),
        (["--devices", "6"], ["--devices = 6", "--devices 4"]),
        (["--devices", "8", "mesh.data=1"], ["--devices = 8", "--devices 4", "mesh.data=-1"]),
        (["--host-gib", "inf"], ["--host-gib = inf"]),
        (
            ["--meshes", "data.row_tokens=[8192, 16384]"],
            ["data.row_tokens = [8192, 16384]", "--meshes", "data.row_tokens=16384"],
        ),
        pytest.param(
            ["--plot", "a.png", "data.row_tokens=[8192, 16384]"],
            ["data.row_tokens", "--plot"],
            marks=NEEDS_MATPLOTLIB,
        ),
        (["--device", "h100-80gb", "a100"], ["--device = a100", "mean a100-80gb"]),
        (["--device", "h100-80gb", "h200-141gb", "--longest"], ["--longest: ", "--device"]),
        pytest.param(
            ["--device", "h100-80gb", "--device", "b200-180gb", "--plot", "a.png"],
            ["--plot: ", "--device"],
            marks=NEEDS_MATPLOTLIB,
        ),
        (["--tokens", "0"], ["--tokens = 0.0"]),
        (["--document-tokens", "100"], ["32,768 tokens", 1, "documents", "32768"]),
        (["--longest", "--document-tokens", "100"], ["--document-tokens: ", "longest"]),
        (["--plot", "picture"], ["picture", ".png"]),
        (["data.row_tokens=32769"], ["data.row_tokens = 32769", 4]),
        (["batch.rows_per_step=7"], ["batch.rows_per_step = 7", 2]),
        (["attention.ulysses_degree=2"], ["attention.ulysses_degree = 2", "hybrid"]),
        (
            ["model.config=null", "model.source=no/such-folder/here"],
            ["model.source = no/such-folder/here"],
        ),
    ],
)
def test_what_cannot_be_asked_is_a_line_that_says_what_can(asked, words, problem):
    with pytest.raises(UserError, match=messages.holding(*problem)):
        asked(*words)


def test_all_that_cannot_be_is_said_at_once(asked):
    with pytest.raises(UserError) as raised:
        asked(
            "attention.strategy=ulysses",
            "mesh.seq=3",
            "data.row_tokens=32769",
            "batch.rows_per_step=7",
            "--devices",
            "6",
        )
    starts = [problem.partition(":")[0] for problem in raised.value.problems]
    assert {"mesh.seq = 3", "batch.rows_per_step = 7"} <= set(starts)


@pytest.mark.parametrize(
    ("words", "kinds", "changes"),
    [
        ([], None, []),
        (["--device", "b200-180gb"], ["b200-180gb"], []),
        (
            ["--device", "h100-80gb", "h200-141gb", "mesh.seq=2"],
            ["h100-80gb", "h200-141gb"],
            ["mesh.seq=2"],
        ),
        (
            ["--device", "h100-80gb", "mesh.seq=2", "--device", "a100-80gb"],
            ["h100-80gb", "a100-80gb"],
            ["mesh.seq=2"],
        ),
        (["--device=h100-80gb", "mesh.seq=2"], ["h100-80gb"], ["mesh.seq=2"]),
        (["mesh.seq=2", "--device", "typo", "a100"], ["typo", "a100"], ["mesh.seq=2"]),
    ],
)
def test_several_kinds_of_gpus_may_be_named(words, kinds, changes):
    for arguments in (["config.yaml", *words], [*words, "config.yaml"]):
        given = plan.parse_arguments(arguments)
        assert given.device == kinds
        assert sorted([given.config, *given.changes]) == sorted(["config.yaml", *changes])


def test_gpus_and_row_lengths_are_planned_in_one_call(asked, monkeypatch):
    """Each kind with each length, as many tokens a step. What is refused is named, and an error only if nothing is left."""

    def of(config, *, model, cluster, document_tokens):
        if cluster.device_type in refused:
            raise UserError("data.row_tokens: too long\nand more")
        lengths = {
            "row_tokens": config.data.row_tokens,
            "rows_per_step": config.batch.rows_per_step,
        }
        return made.plan(
            device_type=cluster.device_type,
            num_devices=cluster.num_devices,
            tokens_per_s_estimate=1e5,
            **lengths,
        )

    monkeypatch.setattr(planning, "plan_step", of)
    words = [
        "--device",
        "h100-80gb",
        "h200-141gb",
        "a100-80gb",
        "data.row_tokens=[4096, 8192]",
        "--tokens",
        "1e9",
    ]
    refused = ["a100-80gb"]
    said, found = asked(*words)
    planned = [
        ("h100-80gb", 4096, 16),
        ("h100-80gb", 8192, 8),
        ("h200-141gb", 4096, 16),
        ("h200-141gb", 8192, 8),
    ]
    assert [
        (one["device_type"], one["row_tokens"], one["rows_per_step"]) for one in found["plans"]
    ] == planned
    lines = [line.split() for line in said.splitlines() if line.split()[0] in gpus.GPUS]
    assert [(device, tokens) for device, tokens, *_ in lines] == [
        (one[0], f"{one[1]:,}") for one in planned
    ]
    assert lines[0][-1] == "22", "GPU-hours: 1e9 tokens are 10,000 s of 8 GPUs"
    assert "refused: 8 x a100-80gb, rows of 8,192 tokens: data.row_tokens: too long\n" in said
    refused = list(gpus.GPUS)
    with pytest.raises(
        UserError, match=r"(?s)8 x h100-80gb, rows of 4,096 tokens: .*8 x a100-80gb"
    ):
        asked(*words)


GATED = ("model.config=null", "model.source=meta-llama/Llama-3.1-8B")
"""The hub cannot be reached from tests."""


def test_published_sizes_are_named_in_the_first_line_and_beside_the_numbers(asked, monkeypatch):
    layers = []

    def of(config, *, model, cluster, document_tokens):
        layers.append(model.num_layers)
        return made.plan()

    monkeypatch.setattr(planning, "plan_step", of)
    said, found = asked(*GATED)
    first = said.splitlines()[0]
    sizes = published.MODELS["meta-llama/Llama-3.1-8B"]
    assert all(
        part in first
        for part in (sizes.name, "HF_HUB_OFFLINE", published.READ_DATE, sizes.source_url)
    )
    assert found["published_sizes"] == first
    assert f"{sizes.name} (published sizes)" in " ".join(said.split())
    said, found = asked()
    assert found["published_sizes"] is None
    assert "published sizes" not in said
    assert layers == [32, MODEL["num_hidden_layers"]]


def test_a_benchmark_of_all_meshes_uses_published_sizes_too(monkeypatch, capsys):
    """The processes get them as overrides of the config."""
    models = []

    def benchmark_meshes(path, overrides, *, num_steps, model, print_line):
        models.append(config_file.load(path, list(overrides)).model)
        return []

    monkeypatch.setattr(mesh_benchmark, "benchmark_meshes", benchmark_meshes)
    monkeypatch.setattr(mesh_benchmark, "format_table", lambda results: "a table")
    benchmark.main(["configs/quickstart.yaml", *GATED, "--all-meshes"])
    assert (models[0].source, models[0].config["num_hidden_layers"]) == (None, 32)
    assert "meta-llama/Llama-3.1-8B" in capsys.readouterr().out.splitlines()[0]


def test_a_benchmark_with_published_sizes_prints_that_its_weights_are_random(monkeypatch, capsys):
    models = []

    def benchmark_steps(config, *, num_steps):
        models.append(config.model)
        raise UserError("stopped here")

    monkeypatch.setattr(run_benchmark, "benchmark_steps", benchmark_steps)
    with pytest.raises(UserError, match="stopped here"):
        benchmark.main(["configs/quickstart.yaml", *GATED])
    assert (models[0].source, models[0].config["num_hidden_layers"]) == (None, 32)
    line = capsys.readouterr().out.splitlines()[0]
    assert "meta-llama/Llama-3.1-8B" in line
    assert "random weights" in line


@pytest.mark.parametrize(
    ("flag", "least", "place"),
    [("--meshes", 10, r"\[(\d+) of (\d+)"), ("--longest", 3, r"\[(\d+) of about (\d+)")],
)
def test_each_result_is_printed_before_the_next_is_planned(asked, monkeypatch, flag, least, place):
    """With its number and how many there are."""

    def of(config, *, model, cluster, document_tokens=None):
        print("planning", flush=True)
        fits = config.data.row_tokens < 200_000
        short = "" if fits else "too long"
        sizes = {
            "weights": 10.0,
            "attention": 20.0 * config.data.row_tokens / 65536,
            memory.RESERVED: 6.3,
        }
        lengths = {"row_tokens": config.data.row_tokens, "device_gib": sum(sizes.values()) - 6.3}
        return made.plan(fits=fits, shortage=short, memory=sizes, **lengths)

    monkeypatch.setattr(planning, "plan_step", of)
    monkeypatch.setattr(
        search, "_find_next_split", lambda *given, **named: None
    )  # needs the plan extra
    said, _ = asked(flag)
    lines = [line for line in said.splitlines() if line == "planning" or re.search(place, line)]
    assert lines[::2] == ["planning"] * (len(lines) // 2)
    numbers = [tuple(map(int, re.search(place, line).groups())) for line in lines[1::2]]
    assert [number for number, _ in numbers] == list(range(1, len(numbers) + 1))
    assert len(numbers) >= least
    if flag == "--meshes":
        assert {total for _, total in numbers} == {len(numbers)}


@pytest.mark.e2e
@pytest.mark.usefixtures("compiler")
def test_a_gated_model_is_planned_on_a_machine_without_a_network(tmp_path):
    """As a user runs it, without a cache and without a login. Nothing listens at port 9."""
    own = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    own = {
        name: value
        for name, value in own.items()
        if name not in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN")
    }
    config = "configs/llama31_8b_128k_8xh100.yaml"
    words = ["data.row_tokens=16384", "--json", str(tmp_path / "plan.json")]
    command = [sys.executable, "-m", "jaxsp.plan", config, *words]
    done = subprocess.run(command, cwd=REPO, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == exit_codes.OK, done.stderr
    assert "meta-llama/Llama-3.1-8B" in done.stdout.splitlines()[0]
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["published_sizes"] == done.stdout.splitlines()[0]
    assert found["row_tokens"] == 16384
    assert found["fits"] is True
    command = [sys.executable, "-m", "jaxsp.train", config, f"run.directory={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=REPO, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == exit_codes.USER_ERROR, "training needs the weights"
    assert "model.source = meta-llama/Llama-3.1-8B: " in done.stderr


@pytest.mark.e2e
def test_no_device_is_asked_for_and_no_data_read(tmp_path):
    """As a user runs it; a config of a missing file, a folder with config.json alone, no GPU."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = "configs/llama31_8b_128k_8xh100.yaml"
    words = [f"model.source={tmp_path}", "data.row_tokens=8192", "--devices", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxsp.plan", config, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_codes.OK, done.stderr
    assert f"{tmp_path} on 8 x h100-80gb" in " ".join(done.stdout.split())
    # jax 0.10 has something to say of CUDA before anyone can ask it not to
    assert not [
        line
        for line in done.stderr.splitlines()
        if "cudart_stub" not in line and "absl::InitializeLog" not in line
    ]
