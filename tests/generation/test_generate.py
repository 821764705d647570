"""jaxsp generate, and the samples of a run: what transformers generates from the exported model."""

import json

import pytest

from jaxsp import export, generate
from jaxsp.core.errors import UserError, escape
from tests import batches, commands, small_runs

pytestmark = pytest.mark.e2e

PROMPT = "def f(x):\n    return "
MESH = ["mesh.data=4", "mesh.seq=2"]
MODEL = batches.SMALL_LLAMA | {"initializer_range": 0.4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Directory of a run with samples of plain text and of a prompt with a completion."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "a.txt").write_text("abcdefgh" * 10)
    (folder / "b.jsonl").write_text(json.dumps({"prompt": PROMPT, "completion": "x + 1"}))
    text = {"source": str(folder / "a.txt"), "format": "text", "name": "plain"}
    code = {"source": str(folder / "b.jsonl"), "format": "prompt_completion", "name": "code"}
    sections = {
        "run": {"steps": 2, "eval_at_start": True, "generate_samples": 2},
        "model": {"config": MODEL, "tokenizer": "bytes"},
        "mesh": {"data": 2, "seq": 2},
        "data": {"train": [text], "eval": [text, code], "row_tokens": 128},
        "batch": {"rows_per_step": 2},
        "optimizer": {"learning_rate": 1e-3},
    }
    small_runs.train(small_runs.make_fields(folder, **sections))
    return folder / "run"


def read_samples(run):
    lines = commands.read_lines(run / "samples.jsonl")
    return {(line["step"], line["data"], line["sample"]): line for line in lines}


def test_samples_have_the_parts_of_the_documents(run):
    samples = read_samples(run)
    assert list(samples) == [(step, data, 0) for step in (0, 2) for data in ("plain", "code")], (
        "one document each, at each evaluation"
    )
    plain = samples[2, "plain", 0]
    assert (plain["prompt"], plain["reference"]) == ("abcdefgh" * 5, "abcdefgh" * 5 + "<eos>")
    code = samples[2, "code", 0]
    assert (code["prompt"], code["reference"]) == (PROMPT, "x + 1<eos>")


def generate_text(capsys, *words):
    """The printed answer, without the first and the last line."""
    capsys.readouterr()
    generate.main(list(map(str, words)))
    lines = capsys.readouterr().out.split("\n")
    return "\n".join(lines[1:-2]), lines[-2]


def test_the_command_answers_as_the_samples_and_transformers_do(run, capsys, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    (tmp_path / "prompt.txt").write_text(PROMPT)
    words = ["--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 64]
    text, speed = generate_text(capsys, run, *words, *MESH)
    export.main([str(run), str(tmp_path / "hf"), "--dtype", "float32"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([list(PROMPT.encode())])
    answer = model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=256)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    new = answer[0, ids.shape[1] :].tolist()
    assert len(set(new)) > 3
    assert f"{len(PROMPT)} tokens of the prompt, {len(new)} new; prompt and compilation" in speed
    assert tokenizer.decode(new) == read_samples(run)[2, "code", 0]["answer"]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    assert text == escape(expected, keep="\n\t")
    options = ["model.compute_dtype=float32", *MESH]
    again, _ = generate_text(capsys, tmp_path / "hf", *words, *options)
    assert again == text


@pytest.mark.slow
def test_answers_beyond_the_positions_of_the_model_have_a_note(run, capsys):
    words = ["--prompt", "a" * 60, "--max-new-tokens", 4, *MESH]
    for positions, expected in ((63, ""), (62, "note: rows of 63 tokens are longer than the 62")):
        change = f"model.max_position_embeddings={positions}"
        text, _ = generate_text(capsys, run, *words, change)
        assert text.startswith(expected)
        assert ("note" in text) == bool(expected)


def test_a_chat_is_rendered_up_to_the_answer(run, capsys):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    words = ["--max-new-tokens", 8, *MESH]
    change = f"data.chat_template={json.dumps(template)}"
    for system, options in (("", []), ("system: Be brief\n", ["--system", "Be brief"])):
        chat = generate_text(capsys, run, "--chat", "Hi", *options, *words, change)[0]
        prompt = f"{system}user: Hi\nassistant:"
        assert chat == generate_text(capsys, run, "--prompt", prompt, *words)[0]


def test_a_reward_model_is_refused_by_name(tmp_path):
    fields = MODEL | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="is a reward model"):
        generate.main([str(tmp_path), "--prompt", "a"])
