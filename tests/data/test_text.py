"""Text becomes tokens, once."""

import json
import subprocess
import sys

import datasets
import pytest
import tokenizers
import transformers

from jaxsp.core import config, errors
from jaxsp.data import rows, sources, text

FIELD = "data.train.0.source"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def tokenize(name, *, format="text", tokenizer=None, vocab_size=257, workers=1):
    source = config.Source(source=name, format=format)
    return text.tokenize(
        sources.read(source, field=FIELD),
        source=source,
        tokenizer=tokenizer or text.bytes_tokenizer(),
        vocab_size=vocab_size,
        workers=workers,
        field=FIELD,
    )


def words_tokenizer(**special):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if special.get("bos_token"):
        backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_a_token_of_the_bytes_tokenizer_is_a_byte(tmp_path):
    made = text.bytes_tokenizer()
    made.save_pretrained(tmp_path / "tokenizer")
    everything = "".join(map(chr, range(0x800))) + "\r\n \U0001f600 中文 <eos> def f(x):\n\treturn x"
    for tokenizer in (made, transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")):
        ids = tokenizer(everything)["input_ids"]
        assert ids == list(everything.encode())
        assert tokenizer.decode(ids) == everything
        assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<eos>", 256, 257)
    assert sorted(made.get_vocab().values()) == list(range(257))


def test_an_end_is_added_once_and_special_tokens_are_the_tokenizers_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": "two </s>"}\n{"text": ""}')
    both = words_tokenizer(bos_token="<s>", eos_token="</s>")
    assert tokenize("a.jsonl", tokenizer=both)["tokens"][:2] == [[1, 3, 4, 2], [1, 4, 2]]
    ends = tokenize("a.jsonl", tokenizer=words_tokenizer(eos_token="</s>"))
    assert ends["tokens"] == [[3, 4, 2], [4, 2], []]
    assert tokenize("a.jsonl", tokenizer=words_tokenizer())["tokens"] == [[3, 4], [4, 2], []]
    assert (rows.Documents([ends]).lengths.tolist(), rows.Documents([ends]).num_empty) == ([3, 2], 1)


def test_token_records_stay_as_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 256], "labels": [-100, 2, 256]}')
    found = tokenize("a.jsonl", format="tokens")
    assert found.column_names == ["tokens", "labels"]
    assert (found["tokens"], found["labels"]) == ([[1, 2, 256]], [[-100, 2, 256]])


def test_the_same_text_is_tokenised_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    first = tokenize("a.txt")["tokens"]

    def encode(*_, **__):
        raise RuntimeError("tokenised again")

    monkeypatch.setattr(text, "_encode", encode)
    assert tokenize("a.txt")["tokens"] == first
    assert tokenize("a.txt", workers=3)["tokens"] == first
    with pytest.raises(RuntimeError, match="again"):
        tokenize("a.txt", tokenizer=words_tokenizer())
    (tmp_path / "a.txt").write_text("other text")
    with pytest.raises(RuntimeError, match="again"):
        tokenize("a.txt")


def test_the_cache_knows_a_tokenizer_by_its_content(tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    plain, ends = words_tokenizer(), words_tokenizer(eos_token="</s>")
    assert text._files(plain) == text._files(words_tokenizer()) != text._files(ends)
    before = text._files(ends)
    tokenize("a.txt", tokenizer=ends)
    assert text._files(ends) == before, "use must not change what the cache goes by"


def test_workers_change_nothing(tmp_path):
    """Also where JAX has its threads already, which a fork would not survive (it warns)."""
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {number}"}) for number in range(20)))
    program = """
import jax
from jaxsp.core import config
from jaxsp.data import sources, text
jax.devices()
source = config.Source(source="a.jsonl", format="text")
records = sources.read(source, field="f")
args = dict(source=source, tokenizer=text.bytes_tokenizer(), vocab_size=257, workers=2, field="f")
print(text.tokenize(records, **args)["tokens"][:])
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "num_proc=2" in ran.stderr, "the bar says how many work"
    assert "os.fork" not in ran.stderr, ran.stderr
    assert json.loads(ran.stdout) == tokenize("a.jsonl")["tokens"][:]


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [3, 300]}')
    with pytest.raises(errors.UserError, match=r"data\.train\.0\.source = a\.jsonl.*line 2: tokens hold the id 300.*0 to 255"):
        tokenize("a.jsonl", format="tokens", vocab_size=256)
    assert len(tokenize("a.jsonl", format="tokens", vocab_size=301)) == 2
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1, -100], "labels": [1, -100]}')
    with pytest.raises(errors.UserError, match="line 1: tokens hold the id -100"):
        tokenize("b.jsonl", format="tokens", vocab_size=256)
    (tmp_path / "c.jsonl").write_text('{"input_ids": [1, 2], "labels": [-100, -1]}')
    with pytest.raises(errors.UserError, match="line 1: labels hold the id -1"):
        tokenize("c.jsonl", format="tokens", vocab_size=256)
    (tmp_path / "d.txt").write_text("x")
    with pytest.raises(errors.UserError, match=r"d\.txt: tokens hold the id 256.*vocab_size is 256"):
        tokenize("d.txt", vocab_size=256)


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path):
    assert len(text.load_tokenizer("bytes")) == 257
    with pytest.raises(errors.UserError, match=r"model\.tokenizer = nowhere: cannot be loaded"):
        text.load_tokenizer("nowhere")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(errors.UserError, match="broken: cannot be loaded"):
        text.load_tokenizer("broken")
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    transformers.PreTrainedTokenizerFast(tokenizer_object=empty).save_pretrained(tmp_path / "empty")
    with pytest.raises(errors.UserError, match="empty vocabulary"):
        text.load_tokenizer("empty")
