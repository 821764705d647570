"""Adapters are PEFT's, both ways: same files, same loss and gradients, same merged weights."""

import dataclasses
import functools
import json
import math
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core.batch import Batch
from jaxsp.hf import model_config, peft, weights
from jaxsp.hf.multimodal import find_family, is_multimodal, read_text_fields, select_tensors
from jaxsp.hf.peft import ResolvedAdapter
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.run import export_command
from jaxsp.training import specs, train_state
from tests import batches, tolerances
from tests.hf import multimodal, oracle
from tests.messages import assert_refused

torch = oracle.torch
hf_peft = pytest.importorskip("peft", reason="peft is not installed (extra `test`)")

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    # PEFT 0.21.2 uses it
    for message in ("`is_gradient_checkpointing` is deprecated",)
]

SEGMENTS: batches.Segments = [[(0, 9), (9, 2), (11, 13)], [(0, 17), (18, 5)]]
ALL = ("embed_tokens", "lm_head")
MODELS = oracle.MODELS | {
    "gemma3 with vision": multimodal.MODELS["gemma3"],
    "qwen3_5 with vision": multimodal.MODELS["qwen3_5"],
    "muse_glimmer with vision": multimodal.MODELS["muse_glimmer"],
    "phi3 tied": {**oracle.MODELS["phi3"], "tie_word_embeddings": True},
    "llama uneven": {
        **oracle.MODELS["llama3"],
        **{"hidden_size": 44, "intermediate_size": 57, "head_dim": 10, "vocab_size": 83},
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and an adapter. The fields are those of the config's section."""

    model: str
    type: str = "lora"
    rank: int = 3
    alpha: float = 7.0
    use_rslora: bool = False
    targets: Any = "all-linear"
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()

    @property
    def section(self) -> AdapterConfig:
        names = [field.name for field in dataclasses.fields(self) if field.name != "model"]
        return AdapterConfig.model_validate({name: getattr(self, name) for name in names})


GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"
MATRICES = (GATE_UP, DOWN)
CASES = {
    "llama": (Case("llama"), ()),
    "qwen3 dora": (Case("qwen3", type="dora"), ()),
    "matrices of experts": (
        Case("qwen3_moe", targets=[], target_parameters=MATRICES),
        pytest.mark.e2e,
    ),
}
SLOW_CASES = {
    "phi3 rslora": Case("phi3", use_rslora=True),
    "tied": Case("llama tied", targets=["q_proj", "v_proj"], modules_to_save=ALL[:1]),
    "untied": Case("llama3", use_rslora=True, modules_to_save=ALL),
    "embedding": Case("qwen2", rank=1, modules_to_save=ALL[:1]),
    "head": Case("qwen2", type="dora", modules_to_save=ALL[1:]),
    "tied dora": Case("gemma2", type="dora", modules_to_save=ALL),
    "phi3 tied": Case("phi3 tied", targets=["qkv_proj", "down_proj"], modules_to_save=ALL),
    "with vision": Case("gemma3 with vision", targets=["q_proj"], modules_to_save=ALL[:1]),
    "delta nets with vision": Case("qwen3_5 with vision", targets=["in_proj_qkv", "o_proj"]),
    "one of two q_proj": Case("olmo hybrid", targets=["self_attn.q_proj", "v_proj", "g_proj"]),
    "both gates with vision": Case("muse_glimmer with vision", targets=["gate_proj"]),
    "one gate with vision": Case("muse_glimmer with vision", targets=["q_proj", "mlp.gate_proj"]),
    "normalized embedding": Case("muse_glimmer with vision", type="dora", modules_to_save=ALL),
    "uneven": Case("llama uneven", type="dora", rank=8),
    "values of some layers": Case("gemma4", targets=["v_proj"]),
    "MLP beside experts": Case(
        "gemma4_moe",
        targets=["gate_proj"],
        target_parameters=("experts.gate_up_proj", "experts.down_proj"),
    ),
    "alternating rows of experts": Case("gpt_oss", targets=[], target_parameters=MATRICES),
    "gate and up of experts": Case("gpt_oss", targets=["q_proj"], target_parameters=MATRICES[:1]),
    "down of experts": Case("olmoe", targets=[], target_parameters=("down_proj",)),
    "experts beside a shared one": Case("qwen3_5_moe", target_parameters=MATRICES),
    "experts of Mixtral": Case("mixtral", use_rslora=True, target_parameters=MATRICES),
    "experts of GLM": Case("glm4_moe", target_parameters=("gate_up_proj", "down_proj")),
    "experts of Qwen3-Next": Case("qwen3_next", targets=[], target_parameters=MATRICES),
    "experts of Granite": Case("granitemoe", target_parameters=("gate_up_proj", "down_proj")),
} | {
    f"{model} {kind}": Case(model, type=kind)
    for model in (
        *("qwen3_5", "olmo hybrid", "gemma3", "olmo2", "olmo3", "phi3"),
        *("granite", "glm4", "ministral3", "cohere2", "gemma4", "gemma4_shared"),
    )
    for kind in ("lora", "dora")
}
CASES |= {name: (case, pytest.mark.slow) for name, case in SLOW_CASES.items()}


@dataclasses.dataclass(frozen=True)
class Base:
    """A model in a folder, as transformers and jaxsp see it."""

    fields: dict[str, Any]
    directory: pathlib.Path

    @functools.cached_property
    def config(self):
        return model_config.parse_model_config(read_text_fields(self.fields))

    @property
    def auto_class(self) -> Any:
        """Class that loads all parts of the model."""
        if find_family(self.fields) is None:
            return oracle.transformers.AutoModelForCausalLM
        return oracle.transformers.AutoModelForImageTextToText

    def load(self) -> Any:
        return self.auto_class.from_pretrained(self.directory, attn_implementation="eager")

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        stored = safetensors.numpy.load_file(self.directory / "model.safetensors")
        return select_tensors(stored, self.fields)[0]


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    @functools.cache
    def make(name: str) -> Base:
        directory = tmp_path_factory.mktemp("base")
        base = Base(MODELS[name], directory)
        oracle.torch_model(MODELS[name], base.auto_class).save_pretrained(directory)
        return base

    return make


def resolve(base: Base, section: AdapterConfig) -> tuple[ResolvedAdapter, layers.Weights]:
    """The adapter, and the parameter table of the model with it."""
    resolved = peft.resolve(section, base.config)
    config = batches.make_config(adapter=resolved.config.model_dump())
    return resolved, specs.build_table(resolved.model, config.step)


def draw_trained(table: layers.Weights) -> layers.Weights:
    """Random trained weights. Magnitudes are positive."""
    rng = np.random.default_rng(5)

    def draw(param: Parameter) -> np.ndarray:
        values = rng.normal(0, 0.1, param.stacked_shape).astype(np.float32)
        return values if param.is_matrix else 1 + np.abs(values)

    return jax.tree.map(draw, train_state.select_trained(table, table))


def jaxsp_result(base: Base, resolved: ResolvedAdapter, table, trained) -> oracle.Result:
    tensors = base.tensors
    frozen_table = train_state.select_frozen(table, table)
    names = {
        name
        for param in jax.tree.leaves(frozen_table)
        for layer in param.layers or (0,)
        for _, name in param.list_tensors(layer)
    }
    frozen = {name: torch.from_numpy(tensors[name]) for name in names}
    weights = train_state.merge(trained, oracle.stacked(frozen, frozen_table))
    arrays = oracle.packed_rows(SEGMENTS, vocab_size=base.config.vocab_size)
    batch = Batch(**jax.tree.map(jnp.asarray, arrays))
    return oracle.jaxsp_result(resolved.model)(weights, batch)


def peft_result(base: Base, model: Any) -> oracle.Result:
    """Loss and gradients of torch; gradients by the names of the adapter's file."""
    arrays = oracle.packed_rows(SEGMENTS, vocab_size=base.config.vocab_size)
    documents = [
        arrays["tokens_BL"][row, start : start + length]
        for row, segments in enumerate(SEGMENTS)
        for start, length in segments
    ]
    result = oracle.gradients(model, documents)
    weights = dict(model.named_parameters())  # others are buffers
    gradients = {
        name.removeprefix("base_model.model.")
        .replace("model.language_model.", "model.")
        .replace(".modules_to_save.default", "")
        .replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
        .replace(".default", ""): gradient
        for name, gradient in result.gradients.items()
        if gradient is not None and name in weights
    }
    return result._replace(gradients=gradients)


def export(base: Base, section: AdapterConfig, directory: pathlib.Path):
    """Exports random trained weights, and returns everything that they belong to."""
    resolved, table = resolve(base, section)
    trained = draw_trained(table)
    save(base, resolved, table, trained, directory)
    return resolved, table, trained


def save(base: Base, resolved: ResolvedAdapter, table, trained, directory: pathlib.Path) -> None:
    peft.save_adapter(
        trained,
        table=train_state.select_trained(table, table),
        adapter=resolved.config,
        model=resolved.model,
        base=str(base.directory),
        directory=directory,
        is_multimodal=is_multimodal(base.directory),
    )


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=marks) for name, (case, marks) in CASES.items()]
)
def test_an_export_has_the_same_loss_and_gradients_in_peft(tmp_path, base_of, case):
    base = base_of(case.model)
    resolved, table, trained = export(base, case.section, tmp_path / "adapter")
    model = hf_peft.PeftModel.from_pretrained(base.load(), tmp_path / "adapter", is_trainable=True)
    stored = safetensors.numpy.load_file(tmp_path / "adapter/adapter_model.safetensors")
    loaded = hf_peft.get_peft_model_state_dict(model)
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(loaded[name].numpy(), tensor, err_msg=name)

    actual = jaxsp_result(base, resolved, table, trained)
    expected = peft_result(base, model)
    trained_table = train_state.select_trained(table, table)
    named = batches.name_leaves(oracle.stacked(expected.gradients, trained_table))
    found = batches.name_leaves(train_state.select_trained(table, actual.gradients))
    errors = {name: batches.relative_error(found[name], named[name]) for name in named}
    errors["loss"] = batches.relative_error(actual.loss, expected.loss)
    worst = max(errors, key=lambda key: errors[key])
    print(f"loss {errors['loss']:.1e}, worst of all {worst} {errors[worst]:.1e}")
    assert errors["loss"] < tolerances.EVAL
    assert errors[worst] < tolerances.FP32_PARITY, worst


def make_adapter(base: Base, directory: pathlib.Path, **fields: Any) -> Any:
    """An adapter that PEFT makes and saves, with random weights; returns PEFT's model."""
    options = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 7, "init_lora_weights": False}
    model = hf_peft.get_peft_model(base.load(), hf_peft.LoraConfig(**options | fields))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_(0.0, 0.1, generator=generator)
                if weight.ndim == 1:
                    weight.abs_().add_(1.0)
    model.save_pretrained(directory)
    return model


def open_source(base: Base, section: AdapterConfig) -> Any:
    """Checks the config and the files of an adapter, and opens them."""
    resolved, table = resolve(base, section)
    return peft.open_weights(resolved.folder, table)


def read_trained(resolved: ResolvedAdapter, table: layers.Weights) -> layers.Weights:
    reader = peft.open_weights(resolved.folder, table)

    def read(param: Parameter) -> np.ndarray:
        whole = tuple(slice(size) for size in param.shape)
        if param.num_layers is None:
            return reader.read(param, None, whole)
        return np.stack([reader.read(param, layer, whole) for layer in param.layers])

    return jax.tree.map(read, train_state.select_trained(table, table))


PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "regex": ("llama", {"target_modules": r".*\.layers\.\d+\..*_proj"}),
    "excluded": ("llama", {"target_modules": PROJECTIONS, "exclude_modules": ["mlp.up_proj"]}),
    "dropout": ("llama", {"target_modules": PROJECTIONS, "lora_dropout": 0.5}),
    "tied": (
        "llama tied",
        {
            "target_modules": ["q_proj", "v_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "with vision": (
        "gemma3 with vision",
        {"target_modules": r".*language_model.*\.(q_proj|k_proj)"},
    ),
    "one gate with vision": (
        "muse_glimmer with vision",
        {"target_modules": ["q_proj", "self_attn.gate_proj"], "exclude_modules": ".*vision.*"},
    ),
    "experts": ("qwen3_moe", {"target_modules": ["v_proj"], "target_parameters": [DOWN, GATE_UP]}),
    "experts only": ("gpt_oss", {"target_modules": [], "target_parameters": ["gate_up_proj"]}),
    "rslora": ("phi3", {"target_modules": "all-linear", "use_rslora": True}),
    "dora": ("qwen3", {"target_modules": "all-linear", "use_dora": True}),
    "delta nets": ("qwen3_5", {"target_modules": "all-linear"}),
    "rows of each key head": (
        "qwen3_next",
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
    "untied": (
        "llama3",
        {
            "target_modules": PROJECTIONS,
            "use_rslora": True,
            "modules_to_save": ["lm_head", "embed_tokens"],
        },
    ),
}
QUICK_SOURCES = ("regex", "excluded", "tied", "dora")
E2E_SOURCES = ("dropout", "rslora", "experts")


def mark(name):
    """Marks of a source: others are slow."""
    if name in QUICK_SOURCES:
        return []
    return [pytest.mark.e2e if name in E2E_SOURCES else pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in SOURCES])
def test_an_adapter_of_peft_has_the_same_loss_and_its_export_the_same_bits(tmp_path, base_of, name):
    model_name, fields = SOURCES[name]
    base = base_of(model_name)
    model = make_adapter(base, tmp_path / "theirs", **fields)
    kind = "dora" if fields.get("use_dora") else "lora"
    section = AdapterConfig(type=kind, source=str(tmp_path / "theirs"))
    resolved, table = resolve(base, section)
    trained = read_trained(resolved, table)
    loss = jaxsp_result(base, resolved, table, trained).loss
    expected = peft_result(base, model.eval()).loss
    print(f"loss {batches.relative_error(loss, expected):.1e}")
    assert batches.relative_error(loss, expected) < tolerances.EVAL

    save(base, resolved, table, trained, tmp_path / "ours")
    theirs, ours = (
        safetensors.numpy.load_file(tmp_path / directory / "adapter_model.safetensors")
        for directory in ("theirs", "ours")
    )
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        assert batches.is_bitwise_equal(ours[tensor], theirs[tensor]), tensor


@pytest.fixture(scope="module")
def plain_adapter(tmp_path_factory, base_of):
    """Folder of an adapter of all projections of the base "llama"."""
    directory = tmp_path_factory.mktemp("plain") / "adapter"
    make_adapter(base_of("llama"), directory, target_modules=PROJECTIONS)
    return directory


def make_source(directory: pathlib.Path, adapter: pathlib.Path, **changes: Any) -> AdapterConfig:
    """A copy of an adapter whose adapter_config.json has other fields than its weights belong
    to."""
    shutil.copytree(adapter, directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return AdapterConfig(type="lora", source=str(directory))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type", "IA3", "LORA"]),
        ({"rank_pattern": {"q_proj": 4}}, ["rank_pattern"]),
        ({"bias": "all"}, ["bias"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
        ({"modules_to_save": 3}, ["modules_to_save"]),
        ({"modules_to_save": ["score"]}, ["modules_to_save", "score"]),
        ({"modules_to_save": ["lm_head"]}, ["missing", "lm_head.weight"]),
        ({"target_parameters": DOWN}, ["target_parameters", "a list of names"]),
        ({"r": 4}, ["shape", "[3, 56]", "[4, 56]"]),
        ({"r": None}, ["r", "null"]),
        ({"lora_alpha": -1}, ["lora_alpha", "-1"]),
        ({"use_dora": True}, ["type", "dora"]),
    ],
)
def test_what_is_not_supported_in_an_adapter_is_refused(
    tmp_path, base_of, plain_adapter, changes, words
):
    with assert_refused(*words, start="adapter."):
        open_source(base_of("llama"), make_source(tmp_path / "theirs", plain_adapter, **changes))


def test_the_files_of_an_adapter_are_checked(tmp_path, base_of, plain_adapter):
    base = base_of("llama")
    section = make_source(tmp_path / "theirs", plain_adapter)
    path = tmp_path / "theirs/adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with assert_refused("adapter_model.safetensors", "damaged or incomplete"):
        open_source(base, section)
    tensors = safetensors.numpy.load(whole)
    prefix = "base_model.model."
    name = "model.layers.1.self_attn.v_proj.lora_B.weight"
    renamed = name.replace("v_proj", "w_proj")
    tensors[prefix + renamed] = tensors.pop(prefix + name)
    safetensors.numpy.save_file(tensors, path)
    with assert_refused(f"missing tensors: {name}", renamed):
        open_source(base, section)
    path.rename(path.with_name("adapter_model.bin"))
    with assert_refused("pickles"):
        open_source(base, section)


@pytest.mark.parametrize(
    ("model", "places", "parameters", "words"),
    [
        ("qwen3_5", {"linear_attn.in_proj_z": (0, 1, 3), "self_attn.q_proj": (2,)}, [], None),
        ("qwen3_5", {"self_attn.q_proj": (2,)}, [], None),
        ("qwen3_5", {"linear_attn.in_proj_z": (0,)}, [], ["in_proj_z", "1 of 3 layers"]),
        ("qwen3_5", {"self_attn.r_proj": (2,)}, [], ["no tensors", "self_attn.q_proj"]),
        ("qwen3_moe", {}, [DOWN], None),
        ("qwen3_moe", {}, ["mlp.gate.weight", DOWN], ["mlp.gate.weight", GATE_UP, DOWN]),
    ],
)
def test_a_projection_has_adapters_in_all_layers_that_have_it(
    tmp_path, model, places, parameters, words
):
    """Layers 0, 1 and 3 of Qwen3.5 are delta nets, layer 2 has attention."""
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    stored = {
        f"base_model.model.model.layers.{layer}.{name}.lora_A.weight": np.zeros((2, 2), np.float32)
        for name, numbers in places.items()
        for layer in numbers
    }
    safetensors.numpy.save_file(stored, tmp_path / "adapter_model.safetensors")
    section = AdapterConfig(type="lora", source=str(tmp_path))
    config = model_config.parse_model_config(oracle.MODELS[model])
    if words is not None:
        with assert_refused(*words, start="adapter.source"):
            peft.resolve(section, config)
        return
    resolved = peft.resolve(section, config).config
    assert ({*resolved.targets}, [*resolved.target_parameters]) == ({*places}, parameters)


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_merged_experts_are_those_of_peft(tmp_path, base_of, model):
    base = base_of(model)
    section = Case(model, targets=["q_proj"], target_parameters=(GATE_UP, DOWN)).section
    resolved, table, trained = export(base, section, tmp_path / "adapter")
    frozen_table = train_state.select_frozen(table, table)
    names = {name for name in base.tensors if "correction" not in name}
    frozen = {name: torch.from_numpy(base.tensors[name]) for name in names}
    state = train_state.merge(trained, oracle.stacked(frozen, frozen_table))
    plain_table, merged = export_command.merge_state(state, table=table, model=resolved.model)
    ours = weights.list_tensors(merged, plain_table, "float32")
    adapted = hf_peft.PeftModel.from_pretrained(base.load(), tmp_path / "adapter")
    theirs = oracle.as_published(
        {
            name: weight.detach().numpy()
            for name, weight in adapted.merge_and_unload().named_parameters()
        }
    )
    assert ours.keys() == theirs.keys()
    changed = [name for name in ours if not np.array_equal(theirs[name], base.tensors[name])]
    assert all("q_proj" in name or "experts" in name for name in changed)
    assert any("gate" in name and "experts" in name for name in changed)
    for name, tensor in ours.items():
        error = batches.relative_error(tensor.to_numpy(), theirs[name])
        assert error < tolerances.MERGE, name


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_tied_weights_that_peft_has_trained_as_copies_are_refused(tmp_path, base_of, names):
    base = base_of("llama tied")
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        make_adapter(base, tmp_path / "a", target_modules=["q_proj"], modules_to_save=names)
    with assert_refused("use the merged model"):
        open_source(base, AdapterConfig(type="lora", source=str(tmp_path / "a")))


def test_the_head_of_a_tied_model_is_trained_as_its_embedding(base_of):
    base = base_of("llama tied")
    for names in (ALL, ALL[:1]):
        _, table = resolve(base, Case("llama tied", modules_to_save=names).section)
        assert [param.hf_name for param in jax.tree.leaves(table) if param.is_trainable].count(
            "model.embed_tokens.weight"
        ) == 1
    with assert_refused("modules_to_save", "lm_head", "embed_tokens", start="adapter."):
        resolve(base, Case("llama tied", modules_to_save=ALL[1:]).section)


SHAPES = ((48, 48), (131, 64), (1111, 128), (257, 2048), (48, 40), (131, 67), (2, 3))


@pytest.mark.parametrize("rank", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_merged_weights_are_those_of_peft(kind, rank, record_property):
    """Bit for bit, except DoRA's, where numpy and torch agree on B A: see `tolerances.MERGE`."""
    rng = np.random.default_rng(rank)
    scale = 7 / (math.sqrt(rank) if kind == "rslora" else rank)
    num_equal = 0
    for dim_out, dim_in in SHAPES:
        shapes = ((dim_out, dim_in), (rank, dim_in), (dim_out, rank))
        weight, a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes)
        magnitude = None
        if kind == "dora":
            magnitude = (1 + rng.random(dim_out)).astype(np.float32)
        expected = merge_with_peft(weight, a, b, magnitude, use_rslora=kind == "rslora")
        merged = export_command.merge_matrix(weight, a, b, scale=scale, magnitude_o=magnitude)
        error = batches.relative_error(merged, expected)
        print(f"{kind}, rank {rank}, {dim_out} x {dim_in}: {error:.1e}")
        assert error < (tolerances.MERGE if magnitude is None else tolerances.MERGE_DORA)
        product = (torch.from_numpy(b) @ torch.from_numpy(a)).numpy()
        if magnitude is None and batches.is_bitwise_equal(b @ a, product):
            assert batches.is_bitwise_equal(merged, expected), (dim_out, dim_in)
            num_equal += 1
    record_property("equal bit for bit", num_equal)
    assert num_equal == len(SHAPES) or rank > 1 or kind == "dora"


def merge_with_peft(weight, a, b, magnitude, *, use_rslora: bool) -> np.ndarray:
    """The matrix that a layer of PEFT merges, with alpha 7."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    options = {"use_rslora": use_rslora, "use_dora": magnitude is not None}
    config = hf_peft.LoraConfig(r=len(a), lora_alpha=7, **options)
    adapted = hf_peft.tuners.lora.Linear(layer, "default", config, r=len(a), lora_alpha=7)
    targets = [(layer, weight), (adapted.lora_A["default"], a), (adapted.lora_B["default"], b)]
    if magnitude is not None:
        targets.append((adapted.lora_magnitude_vector["default"], magnitude))
    with torch.no_grad():
        for module, array in targets:
            module.weight.copy_(torch.from_numpy(array))
    adapted.merge()
    return layer.weight.detach().numpy()
