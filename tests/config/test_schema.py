"""Valid configs, and the messages for invalid ones."""

import pathlib
import re
from datetime import timedelta

import pytest
import yaml

from jaxsp.config import config_errors, config_file, yaml_io
from jaxsp.config.data_schema import SourceConfig
from jaxsp.config.objective_schema import DEFAULTS, FORMATS
from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError

VALID = """
run: {directory: runs/first, steps: 3}
model: {config: {model_type: llama}}
data: {train: [{source: a.txt, format: text}, {source: b.txt, format: text}], row_tokens: 128}
batch: {rows_per_step: 8}
optimizer: {learning_rate: 1.0e-3}
"""


@pytest.fixture
def file(tmp_path) -> pathlib.Path:
    path = tmp_path / "config.yaml"
    path.write_text(VALID)
    return path


def problems(file: pathlib.Path, *words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config_file.load(file, list(words))
    assert not any("\n" in problem for problem in caught.value.problems)
    return caught.value.problems


def test_defaults_are_filled_in(file):
    config = config_file.load(file, [])
    assert (config.run.steps, config.run.epochs, config.mesh.data, config.optimizer.name) == (
        3,
        None,
        -1,
        "adamw",
    )


def test_overrides_change_the_file(file):
    words = [
        "mesh.seq=4",
        "data.train.1.source=c/*.txt",
        "run.steps=null",
        "run.epochs=2",
        "model.config.hidden_size=64",
    ]
    config = config_file.load(file, words)
    assert config.mesh.seq == 4
    assert [source.source for source in config.data.train] == ["a.txt", "c/*.txt"]
    assert (config.run.steps, config.run.epochs) == (None, 2)
    assert config.model.config == {"model_type": "llama", "hidden_size": 64}


def test_an_override_sets_a_field_of_a_section_that_the_file_leaves_empty(file):
    file.write_text(VALID + "mesh:\n")
    assert config_file.load(file, ["mesh.seq=2"]).mesh.seq == 2


@pytest.mark.parametrize("number", ["3e-4", "3.e-4", "0.3e-3", "3E-4", "+3e-04", "0.0003", "30e-5"])
def test_numbers_with_exponents_are_numbers(file, number):
    """PyYAML reads 3e-4 as text."""
    assert config_file.load(
        file, [f"optimizer.learning_rate={number}"]
    ).optimizer.learning_rate == pytest.approx(3e-4)
    file.write_text(VALID.replace("1.0e-3", number))
    assert config_file.load(file, []).optimizer.learning_rate == pytest.approx(3e-4)


@pytest.mark.parametrize("text", ["12:30", "010", "1:30.5", "-1:30", "00"])
def test_text_that_yaml_1_1_reads_as_an_octal_or_sexagesimal_number_is_not_a_number(file, text):
    assert yaml_io.load(text) == text
    assert yaml_io.load(yaml_io.dump({"x": text})) == {"x": text}
    assert f"run.seed = '{text}': must be a valid integer" in problems(file, f"run.seed={text}")[0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1f", 31),
        (".5e3", 500.0),
        ("0.5", 0.5),
        ("2.", 2.0),
    ],
)
def test_other_numbers_of_yaml_are_numbers(text, number):
    assert yaml_io.load(text) == number
    assert type(yaml_io.load(text)) is type(number)


@pytest.mark.parametrize(
    "directory", ["runs/first", "3e-4", "1.5", "null", "on", "läufe", "a: b", "two\nlines", " "]
)
def test_a_saved_config_is_read_back(file, tmp_path, directory):
    first = config_file.load(file, ["mesh.seq=2"])
    first = first.model_copy(update={"run": first.run.model_copy(update={"directory": directory})})
    config_file.save(first, tmp_path / "saved.yaml")
    assert config_file.load(tmp_path / "saved.yaml", []) == first


@pytest.mark.parametrize("text", ["0s", "0.6s", "90s", "25m", "1.5h", "36h", "239999.999h"])
def test_a_saved_duration_is_read_back(file, tmp_path, text):
    config = config_file.load(file, [f"run.shutdown_grace={text}"])
    config_file.save(config, tmp_path / "saved.yaml")
    assert config_file.load(tmp_path / "saved.yaml", []) == config


@pytest.mark.parametrize(
    ("text", "steps", "interval"),
    [
        ("1h", None, timedelta(hours=1)),
        ("30m", None, timedelta(minutes=30)),
        ("100", 100, None),
        ("epoch", None, None),
        ("null", None, None),
    ],
)
def test_checkpoints_follow_after_steps_or_a_duration(file, tmp_path, text, steps, interval):
    config = config_file.load(file, [f"run.save_every={text}", "run.steps=null", "run.epochs=1"])
    assert config.run.save_steps == steps
    assert config.run.save_interval == interval
    config_file.save(config, tmp_path / "saved.yaml")
    assert config_file.load(tmp_path / "saved.yaml", []) == config


def test_all_problems_are_reported_together(file):
    file.write_text(
        VALID.replace("rows_per_step: 8", "rows_per_step: 0").replace(
            "steps: 3", "epochs: [1], steps: x"
        )
    )
    messages = problems(
        file,
        "mesh.seq=two",
        "mesh",
        "data.train.7.source=x",
        "nonsense=1",
        "data.train.0.format=json",
    )
    starts = [
        "mesh: ",
        "data.train.7.source = x: ",
        "run.steps = x, run.epochs = [1]: ",
        "run.steps = x: ",
        "run.epochs = [1]: ",
        "mesh.seq = two: ",
        "data.train.0.format = json: ",
        "batch.rows_per_step = 0: ",
        "nonsense = 1: ",
    ]
    assert [problem.startswith(start) for problem, start in zip(messages, starts, strict=True)] == [
        True
    ] * len(starts), messages


MESSAGES = {
    "mesh.sq=4": "mesh.sq = 4: unknown. Did you mean mesh.seq?",
    "mseh.seq=4": "mseh = {seq: 4}: unknown. Did you mean mesh?",
    "mesh.sep=4": "mesh.sep = 4: unknown. Did you mean mesh.seq?",
    "learning_rate=1": "learning_rate = 1: unknown. Use optimizer.learning_rate.",
    "model.learning_rat=1": (
        "model.learning_rat = 1: unknown. Fields of model: source, config, tokenizer, "
        "compute_dtype, rope, max_position_embeddings, linear_dtype, experts_kernel, "
        "router_aux_loss_coef, "
        "router_z_loss_coef."
    ),
    "memory.xyz=1": (
        "memory.xyz = 1: unknown. Fields of memory: remat, kept_mlp_layers, "
        "offload_activations, offload_every, "
        "offload_during_attention, offload_optimizer, mlp_tile_tokens, loss_tile_tokens, "
        "grad_reduce_dtype."
    ),
    "data.train.0.sourc=x": "data.train.0.sourc = x: unknown. Did you mean data.train.0.source?",
    "run.steps=0": (
        "run.steps = 0: must be at least 1. Number of optimizer updates. For example "
        "run.steps=1000."
    ),
    "run.steps=null": "run.steps, run.epochs: .*missing.*run.epochs=1.",
    "run.epochs=1": "run.steps = 3, run.epochs = 1: .*run.steps=null or run.epochs=null.",
    "run.save_every=0": "run.save_every = 0: .*duration.*epoch.*null.*=100.",
    "run.save_every=0m": "run.save_every = 0m: .*duration.*epoch.*null.*=100.",
    "run.eval_every=1m": "run.eval_every = 1m: .*epoch.*null.*=100.",
    "run.early_stopping_patience=2": (
        "run.early_stopping_patience = 2: .*data.eval=.*eval_fraction=0.05."
    ),
    "run.directory=az://bucket/run": (
        "run.directory = az://bucket/run: must .* s3:// or gs://.*=runs/first."
    ),
    "run.resume=s3://key:secret@bucket/run": (
        "run.resume = .*: must have only a bucket and a path.*=auto."
    ),
    "run.early_stopping_min_delta=0.1": (
        "run.early_stopping_min_delta = 0.1: .*stopping_patience=3.*=0."
    ),
    "run.save_every=epoch": "run.save_every = epoch: .*run.epochs=1.*run.save_every=100.",
    "run.eval_every=epoch": "run.eval_every = epoch: .*run.epochs=1.*run.eval_every=100.",
    "run.save_every=1d": "run.save_every = 1d: .*duration.*=100.",
    "run.shutdown_grace=25": "run.shutdown_grace = 25: .*unit.*110m.*run.shutdown_grace=25s.",
    "run.shutdown_grace=-1s": "run.shutdown_grace = -1s: .*unit.*run.shutdown_grace=25s.",
    "run.stop_after=999999999h": "run.stop_after = 999999999h: .*at most 240000h.*=110m.",
    "run.step_timeout=0s": "run.step_timeout = 0s: must be longer than 0s.*run.step_timeout=30m.",
    "model.source=a/b": (
        "model.source = a/b, model.config = .*: .*model.source=null or model.config=null."
    ),
    "model.config=null": "model.source, model.config: .*missing.*model.source=.*.",
    "logging.profile_steps=[4, 2]": "logging.profile_steps = [4, 2]: .*first.*last.*=[3, 5].",
    "run.directory=7": "run.directory = 7: .*text.*quote.*run.directory=runs/first.",
    "run.directory=''": "run.directory = '': .*empty.*=runs/first.",
    "mesh.data=0": "mesh.data = 0: .*mesh.data=-1.",
    "mesh.data=-2": "mesh.data = -2: .* -1.*mesh.data=-1.",
    "mesh.seq=2.0": "mesh.seq = 2.0: .*integer.*",
    "mesh.seq=[1, 2]": "mesh.seq = [1, 2]: .*integer.*auto.*mesh.seq=4.",
    "mesh=4": "mesh = 4: .*replica, data, seq, virtual_cpu_devices.",
    "mesh=null": "mesh = null: .*replica, data, seq, virtual_cpu_devices.",
    "data.train=[]": "data.train = []: .* 1 .*data.train=[{source: .*}].",
    "data.train=a.txt": "data.train = a.txt: .*list.*data.train=[{source: .*}].",
    "data.train=[a.txt]": "data.train.0 = a.txt: .*source, format, name, weight, .*.",
    "data.train=[{source: a.txt, format: x}]": (
        "data.train.0.format = x: .*'text', 'messages', .* or 'tokens'.*=text."
    ),
    "data.row_tokens=[8, 64]": "data.row_tokens = [8, 64]: .*integer.*data.row_tokens=8192.",
    "data.train.1.weight=1": "data.train.0.weight: .*missing.*data.train.0.weight=1.",
    "data.eval=[{source: a.txt, format: text, weight: 1}]": "data.eval.0.weight: .*evaluated.*",
    "data.chat_template=a.jinja": "data.chat_template = a.jinja: .*text or tokens.*",
    "data.chat_template_kwargs={a: 1}": "data.chat_template_kwargs = {a: 1}: .*text or tokens.*",
    "data.train.0.format=unpaired": ".*format = unpaired: .*objective.type=kto; .*",
    "objective.beta=0.1": "objective.beta = 0.1: must be null, because sft .*objective.type=dpo.*",
    "data.train.x=1": "data.train.x = 1: .*data.train.* 2.*data.train.0 or data.train.1.",
    "batch.rows_per_microbatch=0": "batch.rows_per_microbatch = 0: .*auto.* 1.*=2.",
    "memory.mlp_tile_tokens=0": "memory.mlp_tile_tokens = 0: .*auto.* 1.*=4096.",
    "memory.loss_tile_tokens=null": "memory.loss_tile_tokens = null: .*auto.*=1024.",
    "memory.loss_tile_tokens=true": "memory.loss_tile_tokens = true: .*auto.*=1024.",
    "data.train.2.source=c.txt": (
        "data.train.2.source = c.txt: .*data.train.* 2.*data.train.0 or data.train.1."
    ),
    "data.train.²=1": "data.train.² = 1: .*data.train.* 2.*data.train.0 or data.train.1.",
    "run.steps.x=1": "run.steps.x = 1: .*run.steps = 3.*",
    "optimizer.learning_rate=.nan": "optimizer.learning_rate = nan: .*finite.*=1e-05.",
    "optimizer.learning_rate=fast": "optimizer.learning_rate = fast: .*number.*=1e-05.",
    "optimizer.learning_rate=true": "optimizer.learning_rate = true: .*number.*=1e-05.",
    "optimizer.eps=.inf": "optimizer.eps = inf: .*finite.*=1e-08.",
    "run.eval_at_start=true": "run.eval_at_start = true: .*data.eval=.*data.eval_fraction=0.05.",
    "optimizer={learning_rate: 1, warmup_steps: 2, warmup_fraction: 0.1}": (
        "optimizer.warmup_steps = 2, "
        "optimizer.warmup_fraction = 0.1: .*optimizer.warmup_steps=0 or "
        "optimizer.warmup_fraction=null."
    ),
    "optimizer.beta1=1": "optimizer.beta1 = 1: .* 1.*optimizer.beta1=0.9.",
    "run.directory=2026-13-01": "run.directory = 2026-13-01: .*YAML.*'run.directory=\"...\"'.",
    "run.directory={a}/b": "run.directory = {a}/b: .*YAML.*'run.directory=\"...\"'.",
    "mesh.seq": "mesh.seq: .*key.path=value.*mesh.seq=4.",
    "=4": "=4: .*key.path=value.*",
    "mesh..seq=4": "mesh..seq=4: .*key.path=value.*",
}


@pytest.mark.parametrize(("word", "message"), MESSAGES.items())
def test_one_mistake_is_one_line_with_field_value_rule_and_suggestion(file, word, message):
    (actual,) = problems(file, word)
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    assert re.fullmatch(pattern, actual), actual


def test_missing_fields_are_reported_with_their_meaning_and_a_value(file):
    file.write_text("data: {}\nrun: {}\n")
    messages = problems(file)
    names = ["data.row_tokens", "data.train", "run.directory"]
    for name in names:
        (line,) = [line for line in messages if line.startswith(f"{name}: ")]
        assert "missing" in line
        assert f" {name}=" in line
    (line,) = [line for line in messages if line.startswith("model: ")]
    assert "source, config, tokenizer, compute_dtype, rope, max_position_embeddings" in line
    assert len(messages) == len(names) + 4, messages  # steps or epochs; model, batch, optimizer


def test_counts_are_32_bit_integers():
    """Counts on the devices are 32-bit integers; larger ones would raise OverflowError."""
    counts = [
        f"{group}.{name}"
        for group, name, _ in fields()
        if config_errors.coerce_value(f"{group}.{name}", 7) == 7
    ]
    whole = [key for key in counts if config_errors.coerce_value(key, 7.5) is None]
    assert len(whole) >= 20
    for key in whole:
        largest = 2**32 - 1 if key == "run.seed" else 2**31 - 1
        assert config_errors.coerce_value(key, largest) == largest, key
        for value in (largest + 1, 10**30, 1e30):
            assert config_errors.coerce_value(key, value) is None, (key, value)


def test_the_example_of_every_field_is_valid():
    inner = [f"data.train.0.{name}" for name in SourceConfig.model_fields]
    for key in [*(f"{group}.{name}" for group, name, _ in fields()), *inner]:
        name, _, text = config_errors.suggest_override(key).partition("=")
        assert name == key
        assert config_errors.coerce_value(key, yaml_io.load(text)) is not None, key


@pytest.mark.parametrize(
    ("word", "works"),
    [
        ("optimizer.warmup_steps=0.1", "optimizer.warmup_fraction=0.1"),
        ("optimizer.warmup_fraction=50", "optimizer.warmup_steps=50"),
        ("run.steps=1e5", "run.steps=100000"),
        ("optimizer.schedule=cosin", "optimizer.schedule=cosine"),
        ("mesh.seq=4.0", "mesh.seq=4"),
    ],
)
def test_the_message_for_a_wrong_value_suggests_the_intended_one(file, word, works):
    (line,) = problems(file, word)
    assert works in re.findall(r"[\w.]+=[\w.]*\w", line)
    config_file.load(file, [works])


def test_the_values_in_suggestions_are_valid(file):
    for group, name, _ in fields():
        key = f"{group}.{name}"
        lists = ("targets", "target_parameters", "modules_to_save")
        keys = (
            "data.eval",
            "eval.tasks",
            "optimizer.groups",
            *(f"adapter.{part}" for part in lists),
        )
        others = dict.fromkeys(keys, "x")
        wrong = (others | {"logging.trackers": "3"}).get(key, "[]")
        (example,) = re.findall(
            rf"For example ({key}=.*)\.$", "\n".join(problems(file, f"{key}={wrong}")), re.MULTILINE
        )
        other = {
            "optimizer.decay_fraction": ["optimizer.schedule=wsd"],
            "optimizer.decay_steps": ["optimizer.schedule=wsd"],
            "optimizer.decay_shape": ["optimizer.schedule=wsd"],
            "optimizer.momentum": ["optimizer.name=sgd"],
            "optimizer.nesterov": ["optimizer.name=sgd", "optimizer.momentum=0.9"],
            "run.epochs": ["run.steps=null"],
            "model.source": ["model.config=null"],
            "data.chat_template": ["data.train.0.format=messages"],
            "data.chat_template_kwargs": ["data.train.0.format=messages"],
            "run.early_stopping_patience": [
                "data.eval_fraction=0.1",
                "run.eval_every=epoch",
                "run.steps=null",
                "run.epochs=1",
            ],
            "run.early_stopping_min_delta": [
                "run.early_stopping_patience=1",
                "data.eval_fraction=0.1",
                "run.eval_every=5",
                "checkpoint.best_eval=held_out",
            ],
            "memory.offload_every": ["memory.offload_activations=layer_inputs"],
            "memory.offload_during_attention": ["memory.offload_activations=layer_inputs"],
            "checkpoint.best_eval": [
                "checkpoint.keep_best=1",
                "data.eval=[{source: a.txt, format: text, name: held out}]",
            ],
        }
        if group == "objective" and name != "type":
            (kind, *_) = (kind for kind, own in DEFAULTS.items() if name in own)
            formats = [f"data.train.{number}.format={FORMATS[kind]}" for number in (0, 1)]
            other[key] = [f"objective.type={kind}", *formats]
        if group == "adapter" and name != "type":
            other[key] = ["adapter.type=lora"]
        config_file.load(file, [example, *other.get(key, [])])


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["adapter.rank=8", "adapter.targets=[q_proj]"], ["rank", "targets"]),
        (["adapter.type=none", "adapter.use_rslora=false"], ["use_rslora"]),
        (["adapter.quantization=nf4"], ["quantization"]),
        (
            ["adapter.source=a/b", "adapter.modules_to_save=[lm_head]"],
            ["source", "modules_to_save"],
        ),
        (["adapter.type=dora", "adapter.dropout=0.1"], ["dropout"]),
    ],
)
def test_a_field_that_the_adapter_does_not_have_is_refused(file, words, fields):
    messages = problems(file, *words)
    assert [message.split(" ")[0] for message in messages] == [f"adapter.{name}" for name in fields]
    assert all("adapter.type=lora" in message for message in messages)


def test_the_saved_config_of_a_run_without_an_adapter_loads_again(file, tmp_path):
    saved = tmp_path / "saved.yaml"
    saved.write_text(yaml.safe_dump(config_file.load(file, []).model_dump(mode="json")))
    assert config_file.load(saved, []).adapter.type == "none"


def test_a_saved_config_of_short_rows_loads_again(file, tmp_path):
    """It has the default of max_segments_per_row, which is more than the row has tokens."""
    saved = tmp_path / "saved.yaml"
    saved.write_text(
        yaml.safe_dump(config_file.load(file, ["data.row_tokens=32"]).model_dump(mode="json"))
    )
    assert config_file.load(saved, []).data.row_tokens == 32


def test_an_eval_set_can_be_named_held_out_if_nothing_is_held_out(file):
    sets = (
        "data.eval=[{source: a.txt, format: text, name: held_out}, {source: b.txt, format: text}]"
    )
    assert config_file.load(file, [sets]).data.eval[0].name == "held_out"
    (message,) = problems(file, sets, "data.eval_fraction=0.1")
    assert message.startswith("data.eval.0.name = held_out: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a: [1", "YAML.*while parsing"),
        (b"run: {}\nmesh: {}\nrun: {}\n", "YAML.*run.*twice"),
        (b"run: {seed: 1, seed: 2}\n", "YAML.*seed.*twice"),
        (b"run: 2026-13-01\n", "YAML.*month must be in 1..12"),
        (b"- 1\n", "`section: {field: value}`"),
        (b"", "`section: {field: value}`"),
        (b"\xff\xfe\xff", "(utf-8|UTF-8|codec)"),
    ],
)
def test_a_file_without_a_config_is_one_line(file, text, says):
    file.write_bytes(text)
    (message,) = problems(file)
    assert re.match(f"{re.escape(str(file))}: .*{says}", message), message


def test_the_message_for_a_missing_file_names_an_existing_one(tmp_path, monkeypatch):
    (message,) = problems(tmp_path / "x.yaml")
    assert message.startswith(f"{tmp_path}/x.yaml: no such file. ")
    assert pathlib.Path(re.search(r"\S+quickstart\.yaml", message).group()).is_file()
    monkeypatch.chdir(tmp_path)
    (elsewhere,) = problems(tmp_path / "x.yaml")
    assert pathlib.Path(re.search(r"\S+quickstart\.yaml", elsewhere).group()).is_file()
    (message,) = problems(tmp_path)
    assert message.startswith(f"{tmp_path}: cannot be read: ")


@pytest.mark.parametrize("text", [None, "- 1\n"])
def test_without_the_repository_a_config_to_start_from_is_printed(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        config_file, "__file__", str(tmp_path / "site-packages/jaxsp/config/config_file.py")
    )
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    first, *lines = problems(path)
    assert "quickstart" not in first
    path.write_text("\n".join(lines))
    assert config_file.load(path, []).run.directory


@pytest.mark.parametrize(
    "field", ["run.directory", "run.resume", "model.source", "model.tokenizer"]
)
def test_a_tilde_in_a_path_is_a_home_folder(file, monkeypatch, tmp_path, field):
    monkeypatch.setenv("HOME", "/home/me")
    group, name = field.split(".")
    words = ["model.config=null"] if field == "model.source" else []
    config = config_file.load(file, [f"{field}=~/x", *words])
    assert getattr(getattr(config, group), name) == "/home/me/x"
    for value in ("runs/a/", "./~x", "Qwen/Qwen3-0.6B"):
        config = config_file.load(file, [f"{field}={value}", *words])
        assert getattr(getattr(config, group), name) == value, "as it was written"
    for value in ("~nosuchuser/x", f"a/{'b' * 256}"):
        (line,) = problems(file, f"{field}={value}", *words)
        assert line.startswith(f"{field} = ")


def test_a_long_value_is_shortened(file):
    (message,) = problems(file, f"mesh.seq={'x' * 1000}")
    assert len(message) < 300


def fields() -> list:
    return [
        (group, name, field)
        for group, outer in Config.model_fields.items()
        for name, field in outer.annotation.model_fields.items()
    ]


def test_every_field_has_a_docstring_and_is_in_the_help():
    text = config_errors.describe_fields()
    inner = [
        ("data", f"train[].{name}", field) for name, field in SourceConfig.model_fields.items()
    ]
    for group, name, field in [*fields(), *inner]:
        assert field.description, f"{group}.{name} has no docstring"
        assert f"  {group}.{name}  (" in text
        assert " ".join(field.description.split()) in text
    for name, outer in Config.model_fields.items():
        assert f"{name}: {outer.annotation.__doc__}" in text


def test_the_help_has_types_and_defaults():
    text = config_errors.describe_fields()
    for line in (
        "run.steps  (int | null; default null)",
        "model.config  (mapping | null; default null)",
        "model.tokenizer  (text | null; default null)",
        "model.compute_dtype  (bfloat16 | float32; default bfloat16)",
        "data.train  (list; required)",
        "run.save_every  (int | duration | epoch | null; default 30m)",
        "run.shutdown_grace  (duration; default 25s)",
        "run.stop_after  (duration | null; default null)",
        "optimizer.eps  (float | null; default null)",
        "optimizer.weight_decay  (float; default 0.0)",
        "memory.mlp_tile_tokens  (auto | int; default auto)",
    ):
        assert line in text


def test_a_config_cannot_be_changed(file):
    config = config_file.load(file, [])
    with pytest.raises(ValueError, match="frozen"):
        config.mesh.seq = 2


def test_weights_require_steps(file):
    words = ["run.steps=null", "run.epochs=1", "data.train.0.weight=1", "data.train.1.weight=3"]
    (message,) = problems(file, *words)
    assert re.match(r"data\.train\.0\.weight: .*run\.steps", message), message
    assert [source.weight for source in config_file.load(file, words[2:]).data.train] == [1, 3]


def test_an_automatic_number_of_devices_needs_a_mesh_that_follows(file):
    (message,) = problems(file, "mesh.seq=auto", "mesh.data=2")
    assert re.search(r"mesh\.seq = .*mesh\.data=-1", message), message
    assert config_file.load(file, ["mesh.seq=auto"]).mesh.data == -1
