"""Problems of a Hugging Face folder are reported before any weight is read.

Names on the hub are folders too.
"""

import json
import math
import pathlib
import re
from typing import Any

import httpx2
import huggingface_hub
import huggingface_hub.errors as hub
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers
from jaxsp.hf import folder, tensors, weights
from jaxsp.model import decoder
from jaxsp.sharding import sharding
from jaxsp.training import train_state
from tests import batches
from tests.messages import assert_names, assert_refused

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 24,
    "qk_norm": "none",
    **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False),
}

MODEL = batches.model(**SIZES)

TIED = batches.model(**SIZES, tie_embeddings=True)

Named = dict[str, np.ndarray]


@pytest.fixture
def model_folder(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder `m` in the working directory, with a model in two files."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m", named(), cut=5)
    return tmp_path / "m"


def named(model: Any = MODEL) -> Named:
    """Random tensors by name."""
    rng = np.random.default_rng(3)
    shapes = weights.tensor_shapes(decoder.param_table(model))
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(directory: pathlib.Path, arrays: Named, *, cut: int = 0) -> None:
    """Writes a folder; with `cut`, the first `cut` tensors are in one file, the rest in another."""
    directory.mkdir(exist_ok=True, parents=True)
    for path in directory.glob("*model*"):
        path.unlink()
    (directory / "config.json").write_text(json.dumps(FIELDS))
    names = list(arrays)
    files = (
        {"model-1.safetensors": names[:cut], "model-2.safetensors": names[cut:]}
        if cut
        else {"model.safetensors": names}
    )
    for file, members in files.items():
        safetensors.numpy.save_file({name: arrays[name] for name in members}, directory / file)
    if cut:
        index = {"weight_map": {name: file for file, members in files.items() for name in members}}
        (directory / folder.INDEX_FILE).write_text(json.dumps(index))


def problems(model: Any = MODEL, source: str = "m") -> list[str]:
    """The problems of a folder, without the field that names it."""
    with pytest.raises(UserError) as raised:
        weights.open_folder(folder.find(source), decoder.param_table(model))
    start = f"model.source = {source}: "
    assert all("\n" not in x and x.startswith(start) for x in raised.value.problems)
    return [problem.removeprefix(start) for problem in raised.value.problems]


def read_whole(reader: weights.WeightReader, name: str) -> np.ndarray:
    return reader.tensors[name].read((slice(None),) * len(reader.tensors[name].shape))


def test_slices_equal_those_of_the_whole_tensor_in_every_dtype(model_folder):
    arrays = {
        "a": np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3),
        "b": np.linspace(-3, 3, 11).astype(np.float16),
        "c": np.linspace(-3, 3, 60).reshape(6, 10).astype(ml_dtypes.bfloat16),
    }
    safetensors.numpy.save_file(arrays, model_folder / "some.safetensors")
    header = tensors.read_header(model_folder / "some.safetensors")
    whole = slice(None)
    for name, index in [
        ("a", (whole, whole, whole)),
        ("a", (slice(1, 6), slice(2, 4), slice(1, 2))),
        ("a", (whole, slice(2, 9), slice(3, 3))),
        ("a", (slice(7, 9), whole, whole)),
        ("b", (slice(3, 7),)),
        ("c", (whole, slice(4, 8))),
        ("c", (slice(5, 6), slice(9, 10))),
    ]:
        part = tensors.view_rows([header[name]]).read(index)
        assert part.dtype == np.float32
        assert batches.is_bitwise_equal(part, arrays[name][index].astype(np.float32))
    joined = tensors.view_rows([header["a"], header["a"]], (40, 3), 20)  # 35 rows in each
    expected = np.concatenate(2 * [arrays["a"].reshape(35, 3)])[20:60]
    for rows in (whole, slice(0, 15), slice(14, 17), slice(15, 16), slice(16, 40), slice(9, 9)):
        assert batches.is_bitwise_equal(joined.read((rows, whole)), expected[rows])


def test_missing_and_surplus_tensors_are_named(model_folder):
    arrays = named()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    write(
        model_folder,
        arrays
        | {
            "model.layers.2.mlp.up_proj.weight": np.zeros(3, np.float32),
            "other.inv_freq": np.zeros(2, np.float32),
        },
    )
    missing, surplus = problems()
    assert_names(missing, "missing", "model.layers.1.mlp.up_proj.weight", "config.json")
    assert_names(surplus, "model.layers.2.mlp.up_proj.weight, other.inv_freq", "config.json")
    assert "missing" not in surplus


def test_tensors_are_found_under_the_names_of_automodel(model_folder):
    """It leaves out `model.`."""
    arrays = named()
    write(model_folder, {name.removeprefix("model."): array for name, array in arrays.items()})
    reader = weights.open_folder(folder.find("m"), decoder.param_table(MODEL))
    for name, array in arrays.items():
        assert batches.is_bitwise_equal(read_whole(reader, name), array)


@pytest.mark.parametrize("name", ["vocab.txt", "config.json", "additional_chat_templates"])
def test_links_out_of_the_folder_are_refused(model_folder, tmp_path, name):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "tool.jinja").write_text("secret")
    (model_folder / name).unlink(missing_ok=True)
    (model_folder / name).symlink_to(secret if "additional" in name else secret / "tool.jinja")
    (tmp_path / "out").mkdir()
    for read in (
        lambda: folder.find("m"),
        lambda: folder.copy_small_files(model_folder, tmp_path / "out"),
        lambda: tokenizers.load("./m"),
    ):
        with pytest.raises(UserError, match=rf"m/{name} is a link to {secret}"):
            read()
    assert not any((tmp_path / "out").iterdir())


def test_links_to_weights_or_inside_the_folder_or_into_the_hubs_blobs_are_allowed(
    model_folder, tmp_path
):
    weights_file = tmp_path / "w.safetensors"
    weights_file.write_bytes(b"")
    (model_folder / "model-00001-of-00002.safetensors").symlink_to(weights_file)
    (model_folder / "vocab.txt").symlink_to("config.json")
    assert folder.find("m").config_fields == FIELDS
    (tmp_path / "link").symlink_to(model_folder)
    assert folder.find("link").config_fields == FIELDS
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs = snapshot.parents[1] / "blobs"
    for path in (snapshot, blobs):
        path.mkdir(parents=True)
    (blobs / "abc").write_text(json.dumps(FIELDS))
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert folder.find(str(snapshot)).config_fields == FIELDS


def test_wrong_shapes_and_dtypes_are_named(model_folder):
    arrays = named()
    up = "model.layers.0.mlp.up_proj.weight"
    norm = "model.layers.1.input_layernorm.weight"
    arrays["model.norm.weight"] = arrays["model.norm.weight"][:-1]
    arrays[up] = arrays[up].T.copy()
    arrays[norm] = arrays[norm].astype(np.float64)
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.int8)
    write(model_folder, arrays)
    shapes, dtypes = problems()
    named_shapes = re.findall(r"([\w.]+) (\[[\d, ]+\]) [^\[,]*(\[[\d, ]+\])", shapes)
    assert named_shapes == [("model.norm.weight", "[15]", "[16]"), (up, "[16, 24]", "[24, 16]")]
    assert_names(dtypes, "F32, F16 or BF16", "lm_head.weight I8", f"{norm} F64")


def test_a_tied_head_must_equal_the_embedding(model_folder, monkeypatch):
    monkeypatch.setattr(tensors, "_COMPARE_ELEMENTS", 7 * 16)
    arrays = named(TIED)
    head = arrays["model.embed_tokens.weight"].copy()
    write(model_folder, arrays | {"lm_head.weight": head})
    weights.open_folder(folder.find("m"), decoder.param_table(TIED))
    head[-1, -1] += 1
    for wrong in (head, head[:-1].copy()):
        write(model_folder, arrays | {"lm_head.weight": wrong})
        (problem,) = problems(TIED)
        assert_names(
            problem, "lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings = true"
        )
        assert "missing" not in problem
    del arrays["model.embed_tokens.weight"]
    write(model_folder, arrays)
    (problem,) = problems(TIED)
    assert_names(problem, "missing", "model.embed_tokens.weight")


def test_files_of_the_index_must_exist(model_folder):
    (model_folder / "model-1.safetensors").unlink()
    (problem,) = problems()
    assert_names(problem, "model.safetensors.index.json", start="model-1.safetensors: ")


def test_an_index_that_differs_from_the_files_is_refused(model_folder):
    path = model_folder / folder.INDEX_FILE
    weight_map = json.loads(path.read_text())["weight_map"]
    last = list(weight_map)[-1]
    first = "model-1.safetensors"
    shorter = {name: file for name, file in weight_map.items() if name != last}
    for changed, name in (
        (weight_map | {last: first}, last),
        (weight_map | {"invented": first}, "invented"),
        (shorter, last),
    ):
        path.write_text(json.dumps({"weight_map": changed}))
        (problem,) = problems()
        assert_names(problem, "model.safetensors.index.json", "files", name)
    for broken in (
        *('{"weight_map": ', "[]", "{}", '{"weight_map": {"a": 1}}'),
        '{"weight_map": {"a": "../model-1.safetensors"}}',
    ):
        path.write_text(broken)
        assert_names(problems()[0], "model.safetensors.index.json", "again")


def test_all_damaged_files_are_named(model_folder):
    first = model_folder / "model-1.safetensors"
    second = model_folder / "model-2.safetensors"
    sound = first.read_bytes()
    length = int.from_bytes(sound[:8], "little")
    second.write_bytes(b"<!DOCTYPE html><html>not here</html>")
    for content in (
        sound[:-1],
        sound[: 8 + length - 1],
        sound[:5],
        b"",
        sound + b"x",
        sound[:8] + b"x" + sound[9:],
        sound.replace(b'"shape":[', b'"shape":-'),
        sound.replace(b'"F32"', b'"F16"'),
    ):
        first.write_bytes(content)
        in_first, in_second = problems()
        size = f"{len(content):,} bytes"
        assert_names(in_first, "damaged or incomplete", size, start="m/model-1.safetensors")
        assert_names(in_second, "damaged or incomplete", start="m/model-2.safetensors")
    first.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid")
    assert_names(problems()[0], "git-lfs", "git lfs pull", start="m/model-1.safetensors")


def test_a_file_that_changes_after_its_check_is_named(model_folder):
    table = decoder.param_table(MODEL)
    reader = weights.open_folder(folder.find("m"), table)
    whole = (slice(None), slice(None))
    file = model_folder / "model-1.safetensors"
    start = "model.source = m: m/model-1.safetensors "
    file.write_bytes(file.read_bytes()[::-1])
    with assert_refused("has changed", start=start):
        reader.read(table["embedding"], None, whole)
    file.unlink()
    with assert_refused("No such file", start=start):
        reader.read(table["embedding"], None, whole)


def test_the_error_for_a_folder_without_weights_lists_its_files(model_folder):
    (model_folder / folder.INDEX_FILE).unlink()
    (model_folder / "pytorch_model.bin").touch()
    (problem,) = problems()
    found = "model-1.safetensors, model-2.safetensors, pytorch_model.bin"
    assert_names(problem, "model.safetensors", folder.INDEX_FILE, found, "pickles")


def write_cache(directory: pathlib.Path, monkeypatch, arrays: Named) -> pathlib.Path:
    """The hub's cache with org/name: a folder with the commit's name, with links into a store."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(directory))
    commit = "0123456789abcdef" * 2 + "01234567"
    snapshot = directory / "models--org--name/snapshots" / commit
    write(directory / "files", arrays, cut=5)
    (directory / "files/tokenizer.json").write_text("{}")
    for path in sorted((directory / "files").iterdir()):
        blob = directory / "models--org--name/blobs" / path.name
        for parent in (blob.parent, snapshot):
            parent.mkdir(parents=True, exist_ok=True)
        path.rename(blob)
        (snapshot / path.name).symlink_to(blob)
    (directory / "models--org--name/refs").mkdir()
    (directory / "models--org--name/refs/main").write_text(commit)
    return snapshot


def test_a_name_on_the_hub_is_its_snapshot_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = named()
    snapshot = write_cache(tmp_path / "hub", monkeypatch, arrays)
    source = folder.find("org/name")
    assert (source.path, source.config_fields, source.is_on_hub) == (snapshot, FIELDS, True)
    table = decoder.param_table(MODEL)
    read = weights.open_folder(source, table).read
    assert batches.is_bitwise_equal(
        read(table["norm"]["weight"], None, (slice(None),)), arrays["model.norm.weight"]
    )
    folder.copy_small_files(source.path, tmp_path / "kept")
    assert {path.name: path.is_symlink() for path in (tmp_path / "kept").iterdir()} == {
        "config.json": False,
        "tokenizer.json": False,
    }
    (snapshot / "model-2.safetensors").unlink()
    assert_names(
        problems(source="org/name")[0],
        "model.safetensors.index.json",
        start="model-2.safetensors: ",
    )
    (snapshot / "config.json").unlink()
    assert_names(problems(source="org/name")[0], "config.json", "hf download org/name")

    write(tmp_path / "org/name", arrays)
    assert folder.find("org/name").path == pathlib.Path("org/name"), "a local folder comes first"


def test_weights_are_downloaded_after_the_config_without_files_that_are_not_needed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    snapshot = write_cache(tmp_path / "hub", monkeypatch, named())
    requests: list[tuple[str, str | None, list[str]]] = []
    real = huggingface_hub.snapshot_download

    def download(name, *, revision, allow_patterns):
        requests.append((name, revision, allow_patterns))
        return real(name, revision=revision, allow_patterns=allow_patterns)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = folder.find("org/name")
    ((_, _, patterns),) = requests
    repository = [*_SMALL_FILES, *_OTHER_FILES]
    chosen = set(huggingface_hub.utils.filter_repo_objects(repository, allow_patterns=patterns))
    assert chosen == set(_SMALL_FILES)
    weights.open_folder(source, decoder.param_table(MODEL))
    files = ["model.safetensors", "model-1.safetensors", "model-2.safetensors"]
    assert requests[1:] == [("org/name", snapshot.name, files)], "the same commit"


_SMALL_FILES = """
    config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    merges.txt vocab.json tokenizer.model chat_template.jinja
    additional_chat_templates/tools.jinja model.safetensors.index.json
""".split()

_OTHER_FILES = """
    model.safetensors model-00001-of-00002.safetensors consolidated.safetensors
    pytorch_model.bin pytorch_model.bin.index.json original/consolidated.00.pth
    original/tokenizer.model original/config.json modeling_x.py
    model.gguf onnx/model.onnx README.md
""".split()


def response_fields(status: int) -> dict[str, Any]:
    return {
        "response": httpx2.Response(
            status, request=httpx2.Request("GET", "https://huggingface.co/api/models/org/name")
        )
    }


def unreachable(cause: Exception) -> Exception:
    """The error of snapshot_download if the model is not in the cache."""
    error = hub.LocalEntryNotFoundError("An error happened")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            hub.GatedRepoError("403", **response_fields(403)),
            ["gated", "https://huggingface.co/org/name", "hf auth login"],
        ),
        (
            hub.RepositoryNotFoundError("401", **response_fields(401)),
            ["folder", "hub", "private", "hf auth login"],
        ),
        (
            unreachable(httpx2.ConnectError("[Errno -3] Temporary failure in name resolution")),
            ["folder", "cache", "Temporary failure in name resolution", "hf download org/name"],
        ),
        (hub.HfHubHTTPError("500 Error\nRequest ID", **response_fields(500)), ["500 Error"]),
        (OSError(28, "No space left on device"), ["[Errno 28] No space left on device"]),
    ],
)
def test_errors_of_the_hub_are_one_line_with_a_suggestion(tmp_path, monkeypatch, error, parts):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    (problem,) = problems(source="org/name")
    assert_names(problem, *parts)


def test_a_mesh_reads_each_weight_once_and_one_shard_at_a_time(model_folder, monkeypatch):
    """So that a process needs memory for its own shards and one tensor."""
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 100)
    counts = []
    read = tensors.StoredTensor.read

    def count(tensor: tensors.StoredTensor, start: int, stop: int) -> np.ndarray:
        counts.append(stop - start)
        return read(tensor, start, stop)

    monkeypatch.setattr(tensors.StoredTensor, "read", count)
    model = batches.model(**SIZES | {"vocab_size": 64})
    write(model_folder, named(model))
    table = decoder.param_table(model)
    reader = weights.open_folder(folder.find("m"), table)
    train_state.load_weights(table, batches.mesh(1, 2, 4), reader.read)
    params = jax.tree.leaves(table)
    assert max(counts) == max(x.size // 8 if x.size >= 100 else x.size for x in params)
    assert sum(counts) == sum(math.prod(param.stacked_shape) for param in params)
