"""Requests of lm-evaluation-harness: those of its own model, with special tokens and templates."""

import copy
import itertools
import json
import math
import types

import jax
import numpy as np
import pytest

from jaxsp import eval as evaluation
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data import tokenizers
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.run import build, config_file, model_files
from tests import batches, small_runs
from tests.data import chats

torch = pytest.importorskip("torch", reason="the harness's own model needs torch")
pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in jaxsp's extra lm-eval")

ROW_TOKENS = 128

ANSWER = "assistant answer line<|im_end|>\nmodel with no start"
"""Text that the model writes after its first token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose texts begin with <s> and end with </s>, and whose chats end with <|im_end|>."""
    import transformers
    from tokenizers import processors

    path = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = chats.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    embeddings = model.model.embed_tokens.weight.data.normal_()
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    for token, following in itertools.pairwise(ids):
        model.lm_head.weight.data[following] = embeddings[token]
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(folder):
    """The harness's own model, and jaxsp's."""
    from lm_eval.models.huggingface import HFLM

    from jaxsp.evaluation import harness

    own = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=ROW_TOKENS - 1)
    data = {"train": [{"source": "unused", "format": "tokens"}], "row_tokens": ROW_TOKENS}
    fields = small_runs.make_fields(folder, model={"source": str(folder)}, data=data)
    resolved = build.prepare_model(
        config_file.parse(fields),
        devices=jax.devices()[:1],
        problems=ProblemCollector(),
        for_training=False,
    )
    spec = resolved.spec
    master = model_files.open_weights(spec, resolved.model_folder, None).make()
    tokenizer = tokenizers.load(str(folder))
    model = harness.HarnessModel(
        Evaluator(spec, []), master, tokenizer, stop_ids=[tokenizer.eos_token_id]
    )
    return own, model


def ask(model, kind, *requests):
    from lm_eval.api.instance import Instance

    instances = [Instance(kind, {}, args, number) for number, args in enumerate(requests)]
    return getattr(model, kind)(instances, disable_tqdm=True)


def test_answers_end_at_the_first_stop_text_which_may_be_a_special_token(models):
    untils = {
        ("Question:", "</s>", "<|im_end|>"): " answer line",
        ("line<|im_end|>",): " answer line",
        ("<|im_end|>\nmodel", " with"): " answer line\nmodel",
        ("\nmodel", " with"): " answer line",
        (" with no", " line"): " answer",
        ("wer l", "<|im_end|>"): " ans",
        ("no such",): " answer line\nmodel with no start",
        (): " answer line\nmodel with no start",
    }
    requests = [
        (prompt, {"until": [*until], "max_gen_toks": 9})
        for until in untils
        for prompt in ("<s>user assistant", "one assistant")
    ]
    expected, actual = (ask(model, "generate_until", *requests) for model in models)
    assert actual == expected
    assert actual[::2] == [*untils.values()]


def test_likelihoods_are_those_of_the_harness(models):
    """With tokens across the border, spaces on both sides, no context, and one that is cut."""
    pairs = [
        (" indent", "ed line and no answer"),
        ("assist", "ants answer"),
        ("an answer ", "no"),
        ("an answer  \n", "  leading"),
        ("an answer", "  \n no"),
        ("", "an answer"),
        ("", " leading"),
        ("", "<s>an answer"),
        ("<s>user", " answer"),
        ("<|im_start|>user\n", "no<|im_end|>"),
        ("start one " * 60, "answer line"),
        ("assistant", " answer line<|im_end|>"),
    ]
    expected, actual = (ask(model, "loglikelihood", *pairs) for model in models)
    for pair, (score, is_greedy), (other, is_other_greedy) in zip(
        pairs, actual, expected, strict=True
    ):
        assert score == pytest.approx(other, rel=1e-4), pair
        assert is_greedy == is_other_greedy, pair
    assert actual[-1][1], "the model writes it"


@pytest.mark.parametrize(
    ("context", "continuation", "pattern"),
    [
        ("x = assist", "ant", "continuation 'ant' of 'x = assist' has no tokens of its own"),
        ("", "<s>", "continuation '<s>' of '' has no tokens of its own"),
        ("x", " no" * 200, "row_tokens = 128: must hold a continuation of 200 tokens"),
    ],
)
def test_continuations_that_the_harness_refuses_are_refused(models, context, continuation, pattern):
    own, model = models
    request = (context, continuation)
    with pytest.raises(AssertionError):
        ask(own, "loglikelihood", request)
    with pytest.raises(UserError, match=pattern):
        ask(model, "loglikelihood", ("x", " no"), request)


def test_the_longest_continuation_is_scored_as_a_whole(models):
    expected, actual = (
        model._loglikelihood_tokens([(None, [5], [7] * (ROW_TOKENS - 1))]) for model in models
    )
    assert actual[0][0] == pytest.approx(expected[0][0], rel=1e-4)


def test_rolling_likelihoods_are_those_of_the_harness(models):
    """Some texts take several windows."""
    texts = [("an answer",), ("start one " * 60,), ("import os\nimport sys\n",)]
    expected, actual = (ask(model, "loglikelihood_rolling", *texts) for model in models)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_options_that_generation_does_not_have_are_refused(models):
    with pytest.raises(UserError, match=r"num_beams.*jaxsp export"):
        ask(models[1], "generate_until", ("one", {"until": [], "num_beams": 4}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--lm-eval", "a,,b"], "has an empty name"),
        (["--lm-eval", "no such task"], "has no task no such task"),
        (["--lm-eval", "x", "--limit", "0"], "--limit = 0: must be at least 1"),
        (["--lm-eval", "x", "--lm-eval-tasks", "missing"], "there is no such folder"),
        (["--limit", "3"], "Use it with --lm-eval TASK"),
    ],
)
def test_wrong_tasks_are_refused_before_anything_is_computed(folder, words, pattern):
    with pytest.raises(UserError, match=pattern):
        evaluation.main([str(folder), f"data.row_tokens={ROW_TOKENS}", *words])


def test_data_of_a_task_that_cannot_be_downloaded_is_an_error_of_one_line():
    from jaxsp.evaluation import harness

    def fail(*arguments, **options):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nmore")

    manager = types.SimpleNamespace(load=fail)
    with pytest.raises(UserError, match=r"^--lm-eval = x: Couldn't reach 'a/b' on the Hub\. Run"):
        harness.evaluate(None, harness.HarnessTasks(["x"], manager, None, None, False), num_steps=0)


def with_template(models, template, kwargs):
    """Both models with a chat template."""
    from jaxsp.evaluation import harness

    own, model = map(copy.copy, models)
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = template
    tokenizer.pad_token = tokenizer.eos_token
    own.tokenizer = tokenizer
    own.chat_template_args = kwargs
    chat = batches.make_config().data.model_copy(update={"chat_template_kwargs": kwargs})
    return own, harness.HarnessModel(
        model._evaluator, model._master, tokenizer, stop_ids=(), chat=chat
    )


THINKS = "{% if enable_thinking is false %}<no-think>{% endif %}" + chats.CHATML


@pytest.mark.parametrize(
    ("template", "kwargs"),
    [(chats.INST, {}), (chats.TURNS, {}), (THINKS, {"enable_thinking": False})],
)
def test_prompts_of_chats_are_those_of_the_harness(models, template, kwargs):
    """Also without the generation prompt, and without a system message that is refused."""
    question = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "an"}
    system = {"role": "system", "content": "be brief"}
    pair = with_template(models, template, kwargs)
    for messages in ([question], [system, question], [system, question, answer, question]):
        expected, actual = (model.apply_chat_template(messages) for model in pair)
        assert actual == expected
        expected, actual = (
            model.apply_chat_template([*messages, answer], add_generation_prompt=False)
            for model in pair
        )
        assert actual == expected
        assert actual.endswith("an")
    assert ("<no-think>" in expected) == bool(kwargs)


def test_chats_that_a_template_refuses_and_templates_that_are_missing_are_named(models):
    _, model = with_template(models, chats.TURNS, {})
    with pytest.raises(UserError, match=r"--apply-chat-template: .*roles must alternate"):
        model.apply_chat_template([{"role": "user", "content": "q"}] * 2)
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        with_template(models, None, {})
    with pytest.raises(UserError, match="tools: the chat template has no variable"):
        with_template(models, chats.TURNS, {"tools": []})


@pytest.mark.parametrize("kwargs", [None, {"enable_thinking": False}])
def test_tasks_have_the_scores_of_the_harness_and_no_git_is_run(
    models, tmp_path, monkeypatch, capfd, kwargs
):
    """Examples, which are drawn with the harness's seeds, are turns of the chat."""
    import lm_eval
    from lm_eval import tasks as harness_tasks

    from jaxsp.evaluation import harness

    records = [{"q": f"user {n} assistant", "a": [" answer line", " no"][n % 2]} for n in range(6)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    common = f"""dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/records.jsonl}}}}
test_split: test
description: be brief
doc_to_text: "{{{{q}}}}"
"""
    (tmp_path / "choice.yaml").write_text(f"""task: own_choice
{common}output_type: multiple_choice
doc_to_choice: [" answer line", " no"]
doc_to_target: "{{{{[' answer line', ' no'].index(a)}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    (tmp_path / "text.yaml").write_text(f"""task: own_text
{common}output_type: generate_until
doc_to_target: "{{{{a}}}}"
num_fewshot: 1
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
""")
    manager = harness_tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    own, model = models if kwargs is None else with_template(models, THINKS, kwargs)
    prompts = []
    for each in (own, model):
        monkeypatch.setattr(each, "generate_until", record_prompts(each, prompts))
    monkeypatch.chdir(tmp_path)
    tasks = harness.HarnessTasks(["own_choice", "own_text"], manager, 5, 2, kwargs is not None)
    lines, _ = harness.evaluate(model, tasks, num_steps=3)
    assert "git" not in capfd.readouterr().err
    expected = lm_eval.simple_evaluate(
        own,
        tasks=["own_choice", "own_text"],
        task_manager=manager,
        limit=5,
        num_fewshot=2,
        apply_chat_template=kwargs is not None,
    )["results"]
    for line in lines:
        for name, value in line["results"].items():
            if math.isfinite(expected[line["lm_eval"]][name]):
                np.testing.assert_allclose(value, expected[line["lm_eval"]][name], err_msg=name)
        assert line["chat_template_kwargs"] == kwargs
        assert line["limit"] == 5
    actual, expected = prompts
    assert actual == expected
    assert all(prompt.count("assistant") == 3 + 3 * (kwargs is not None) for prompt in actual)


def record_prompts(model, prompts):
    generate_until = model.generate_until

    def record(requests, **options):
        prompts.append([request.args[0] for request in requests])
        return generate_until(requests, **options)

    return record
