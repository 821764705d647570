"""Published sizes, and when they are used in place of the hub's config.json."""

import json
import pathlib
import time

import pytest
import yaml

from jaxsp.core.errors import UserError
from jaxsp.hf import context_range, folder, model_config, published
from jaxsp.hf.folder import HubError
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.model import decoder, flops
from jaxsp.run import config_file

REPO = pathlib.Path(__file__).parent.parent.parent

LLAMA = "meta-llama/Llama-3.1-8B"

REFUSED = HubError("a problem with a suggestion", reason="a reason")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Returns a function that sets the result of a download: a folder, or an error.

    The working directory is empty.
    """
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    def set_result(result):
        def download(source, names):
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(folder, "_download", download)

    return set_result


@pytest.mark.parametrize(
    "model", [pytest.param(model, id=name) for name, model in published.read_models().items()]
)
def test_sizes_give_the_published_number_of_parameters(model):
    """This finds wrong sizes, and embeddings that should be tied."""
    read = model_config.parse_model_config(model.fields)
    table = decoder.param_table(read)
    count = flops.num_parameters(table)
    assert count / 1e9 == pytest.approx(model.billion_params, rel=0.01)


def test_every_model_of_a_recipe_has_published_sizes():
    configs = [yaml.safe_load(path.read_text()) for path in (REPO / "configs").glob("*.yaml")]
    named = {fields["model"].get("source") for fields in configs} - {None}
    assert len(named) >= 3
    assert named <= published.read_models().keys()


@pytest.mark.parametrize(
    "path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_recipes_that_extend_a_model_reach_their_rows(path):
    """Their changes fit the published sizes, with which they are planned without a network."""
    config = config_file.load(path, [])
    if config.model.rope is None:
        pytest.skip("has the model's own rope")
    row_tokens = config.data.row_tokens
    fields = published.read_models()[str(config.model.source)].fields
    assert "untrained" in context_range.describe_excess(fields, row_tokens=row_tokens)
    changed = model_config.resolve_fields(fields, config.model)
    assert changed["max_position_embeddings"] == row_tokens
    assert context_range.describe_excess(changed, row_tokens=row_tokens) == ""
    model_config.parse_model_config(changed, row_tokens=row_tokens)


def test_published_sizes_are_used_if_the_hub_refuses_and_never_silently(hub):
    hub(REFUSED)
    sizes = published.read_sizes(ModelSourceConfig(source=LLAMA))
    assert sizes.model.num_layers == 32
    assert sizes.published.name == LLAMA
    assert all(part in sizes.note for part in (LLAMA, "a reason", sizes.published.source))
    changed = dict(word.split("=", 1) for word in sizes.overrides)
    assert changed == {"model.source": "null", "model.config": json.dumps(sizes.published.fields)}


def test_the_hub_s_own_config_comes_before_published_sizes(hub, tmp_path):
    fields = published.read_models()[LLAMA].fields | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    hub(tmp_path)
    sizes = published.read_sizes(ModelSourceConfig(source=LLAMA))
    assert (sizes.model.num_layers, sizes.published, sizes.note, sizes.overrides) == (
        2,
        None,
        "",
        [],
    )


def test_the_error_for_a_model_without_published_sizes_has_the_nearest_name(hub):
    hub(REFUSED)
    with pytest.raises(UserError, match=r"Qwen/Qwen3-14: a reason.*mean Qwen/Qwen3-14B\?"):
        published.read_sizes(ModelSourceConfig(source="Qwen/Qwen3-14"))


def test_a_hub_that_does_not_answer_is_not_waited_for(hub, monkeypatch):
    monkeypatch.setattr(folder, "_download", lambda *given, **named: time.sleep(60))
    monkeypatch.setattr(published, "DEADLINE_S", 0.1)
    began = time.monotonic()
    sizes = published.read_sizes(ModelSourceConfig(source=LLAMA))
    assert time.monotonic() - began < 10
    assert "0.1 s" in sizes.note


def test_training_never_takes_published_sizes(hub):
    hub(REFUSED)
    model = ModelSourceConfig(source=LLAMA)
    with pytest.raises(HubError, match="a problem with a suggestion"):
        folder.find(LLAMA)
    with pytest.raises(HubError, match="a problem with a suggestion"):
        model_config.read_fields(model)
