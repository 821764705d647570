"""Evaluations against plain torch programs and lm-evaluation-harness's own model."""

import json
import math
import types

import jax
import numpy as np
import pytest

from jaxsp import eval as evaluation
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data import tokenizers
from jaxsp.evaluation import long_ppl
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.run import build, config_file, model_files
from tests import tolerances

oracle = pytest.importorskip(
    "tests.hf.oracle", reason="transformers' models need torch, which this Python has no build of"
)

ROW_TOKENS = 192


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model with the tokenizer of bytes, whose losses differ from token to token."""
    import torch
    import transformers

    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizers.make_byte_tokenizer().save_pretrained(path)
    return path


def load(folder):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def compute_losses(model, ids):
    """Loss of each token but the first."""
    import torch

    tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none").numpy()


def run_eval(folder, out, *words):
    words = [f"data.row_tokens={ROW_TOKENS}", "model.compute_dtype=float32", *words]
    evaluation.main([str(folder), *words, "--out", str(out)])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_long_ppl_is_that_of_a_plain_program(folder, tmp_path, monkeypatch):
    """With smaller numbers than the published ones, for a small model."""
    for name, value in (("CONTEXT_TOKENS", 40), ("BLOCK_TOKENS", 16)):
        monkeypatch.setattr(long_ppl, name, value)
    for name, value in (("MIN_GAIN", 0.05), ("MAX_LOSS", 6.0)):
        monkeypatch.setattr(long_ppl, name, value)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 257, length) for length in (20, 41, 56, 57, 100, 191)]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"input_ids": ids.tolist()}) for ids in documents)
    )
    source = {"source": str(tmp_path / "a.jsonl"), "format": "tokens", "name": "a"}
    words = [f"data.eval={json.dumps([source])}", "mesh.data=2", "mesh.seq=4"]
    (line,) = run_eval(folder, tmp_path / "out.jsonl", *words, "eval.long_ppl=true")
    model = load(folder)
    key_losses = []
    for ids in documents:
        full = compute_losses(model, ids)
        for start in range(0, len(ids) - 40, 16):  # of the short text
            short = compute_losses(model, ids[start : start + 56])[39:]
            with_all = full[start + 39 : start + 39 + len(short)]
            key_losses += with_all[(short - with_all > 0.05) & (with_all < 6)].tolist()
    assert len(key_losses) > 20
    assert line["num_key_tokens"] == len(key_losses)
    assert line["long_ppl"] == pytest.approx(math.exp(np.mean(key_losses)), rel=tolerances.EVAL)


def test_long_ppl_needs_rows_with_far_context(folder, tmp_path):
    with pytest.raises(UserError, match=r"eval\.long_ppl = true: .*data\.row_tokens=10240"):
        run_eval(folder, tmp_path / "out.jsonl", "data.eval_fraction=0.5", "eval.long_ppl=true")


TEXTS = ["def main():", "    return 0", "", "import os\nimport sys\n", "x" * 150, "y " * 160]


@pytest.fixture(scope="module")
def harness_models(folder):
    """The harness's own model, and jaxsp's on a mesh."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in jaxsp's extra lm-eval")
    from lm_eval.models.huggingface import HFLM

    from jaxsp.evaluation import harness

    own = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=ROW_TOKENS - 1)
    changes = [f"model.source={folder}", "mesh.data=2", "mesh.seq=2"]
    fields = {
        "run": {"directory": "unused", "steps": 1},
        "data": {"train": [{"source": "unused", "format": "tokens"}], "row_tokens": ROW_TOKENS},
        "batch": {"rows_per_step": 2},
        "model": {"compute_dtype": "float32"},
        "optimizer": {"learning_rate": 0.0},
    }
    resolved = build.prepare_model(
        config_file.parse(fields, changes),
        devices=jax.devices()[:4],
        problems=ProblemCollector(),
        for_training=False,
    )
    spec = resolved.spec
    master = model_files.open_weights(spec, resolved.model_folder, None).make()
    return own, harness.HarnessModel(
        Evaluator(spec, []), master, tokenizers.load(str(folder)), stop_ids=[256]
    )


def make_requests(kind, *args):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(args)]


@pytest.mark.slow
def test_likelihoods_are_those_of_the_harness(harness_models):
    contexts = [*TEXTS, "trailing space ", "z" * 300]
    pairs = [(context, end) for context in contexts for end in (" yes", " no, it is not")]
    expected, actual = (
        model.loglikelihood(make_requests("loglikelihood", *pairs), disable_tqdm=True)
        for model in harness_models
    )
    assert [is_greedy for _, is_greedy in actual] == [is_greedy for _, is_greedy in expected]
    np.testing.assert_allclose(
        [score for score, _ in actual], [score for score, _ in expected], rtol=1e-4
    )


@pytest.mark.slow
def test_answers_are_those_of_the_harness_up_to_a_stop_text(harness_models):
    """Prompts of several lengths, one of which loses its beginning."""
    prompts = ["def f(", "import os\n", "a" * 70, "b c " * 60]
    whole = {"max_gen_toks": 12, "until": []}
    pairs = [(prompt, whole) for prompt in prompts]
    expected, actual = (
        model.generate_until(make_requests("generate_until", *pairs), disable_tqdm=True)
        for model in harness_models
    )
    assert actual == expected
    stop = expected[0][4:6]
    (cut,) = harness_models[1].generate_until(
        make_requests("generate_until", (prompts[0], {"max_gen_toks": 12, "until": [stop]}))
    )
    assert cut == expected[0].split(stop)[0]


def test_an_answer_of_greedy_decoding_is_greedy(harness_models):
    _, model = harness_models
    prompt = model.tok_encode("def f(")
    (answer,) = model._generator.generate(model._master, [prompt], max_new_tokens=5)
    others = [*answer[:-1], (answer[-1] + 1) % 257]
    scores = model._loglikelihood_tokens([(None, prompt, answer), (None, prompt, others)])
    assert [is_greedy for _, is_greedy in scores] == [True, False]


def test_options_that_generation_does_not_have_are_refused(harness_models):
    request = ("def f(", {"until": [], "num_beams": 4})
    with pytest.raises(UserError, match=r"num_beams.*jaxsp export"):
        harness_models[1].generate_until(make_requests("generate_until", request))


def test_the_longest_continuation_is_scored_as_a_whole_and_a_longer_one_refused(harness_models):
    longest = [7] * (ROW_TOKENS - 1)
    request = lambda ids: [(None, [5], ids)]
    expected, actual = (model._loglikelihood_tokens(request(longest)) for model in harness_models)
    assert actual[0][0] == pytest.approx(expected[0][0], rel=1e-4)
    with pytest.raises(UserError, match=r"data\.row_tokens = 192: .*192 tokens"):
        harness_models[1]._loglikelihood_tokens(request([7] * ROW_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--lm-eval", "a,,b"], "has an empty name"),
        (["--lm-eval", "no such task"], "has no task no such task"),
        (["--lm-eval", "x", "--limit", "0"], "--limit = 0: must be at least 1"),
        (["--lm-eval", "x", "--lm-eval-tasks", "missing"], "there is no such folder"),
        (["--limit", "3"], "Use it with --lm-eval TASK"),
        (["--apply-chat-template"], "Use it with --lm-eval TASK"),
    ],
)
def test_wrong_tasks_are_refused_before_anything_is_computed(folder, tmp_path, words, pattern):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in jaxsp's extra lm-eval")
    with pytest.raises(UserError, match=pattern):
        run_eval(folder, tmp_path / "out.jsonl", "data.eval_fraction=0.5", *words)


def test_rolling_likelihoods_are_those_of_the_harness(harness_models):
    """Some texts take several windows."""
    texts = [(text,) for text in [*TEXTS, "abcdefghij" * 60] if text]
    expected, actual = (
        model.loglikelihood_rolling(
            make_requests("loglikelihood_rolling", *texts), disable_tqdm=True
        )
        for model in harness_models
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_data_of_a_task_that_cannot_be_downloaded_is_an_error_of_one_line():
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in jaxsp's extra lm-eval")
    from jaxsp.evaluation import harness

    def fail(*arguments, **options):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nmore")

    manager = types.SimpleNamespace(load=fail)
    with pytest.raises(UserError, match=r"^--lm-eval = x: Couldn't reach 'a/b' on the Hub\. Run"):
        harness.evaluate(None, harness.HarnessTasks(["x"], manager, None, None, False), num_steps=0)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_task_of_ones_own_gets_the_scores_of_the_harness(
    folder, harness_models, tmp_path, capsys, monkeypatch
):
    """In a chat template of the config, with an argument."""
    import lm_eval
    from lm_eval import tasks as harness_tasks

    records = [
        {"q": f"{number} plus 1 is", "choices": [" 7", " eight", " 9"], "gold": number % 3}
        for number in range(12)
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "own.yaml").write_text(
        f"""task: own
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path}/records.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ end }}"
    options = [
        *["--lm-eval", "ow*", "--lm-eval-tasks", str(tmp_path)],
        *["--apply-chat-template", "data.chat_template_kwargs={end: '. '}"],
        f"data.chat_template={json.dumps(template)}",
    ]
    (line,) = run_eval(folder, tmp_path / "out.jsonl", *options)
    monkeypatch.setattr(harness_models[0].tokenizer, "chat_template", template)
    monkeypatch.setattr(harness_models[0], "chat_template_args", {"end": ". "})
    expected = lm_eval.simple_evaluate(
        harness_models[0],
        tasks=["own"],
        apply_chat_template=True,
        task_manager=harness_tasks.TaskManager(include_path=str(tmp_path)),
    )["results"]["own"]
    assert (line["step"], line["lm_eval"]) == (0, "own")
    assert line["chat_template_kwargs"] == {"end": ". "}
    assert line["results"]["acc,none"] == expected["acc,none"]
    assert line["results"]["acc_norm,none"] == expected["acc_norm,none"]
    assert "|own" in capsys.readouterr().out
