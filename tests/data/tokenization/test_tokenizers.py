"""Tests of loading tokenizers."""

import pytest
import tokenizers as library
import transformers

from jaxsp.core.errors import UserError
from jaxsp.data.tokenization import tokenizers


def test_a_token_of_the_bytes_tokenizer_is_a_byte(tmp_path):
    new_tokenizer = tokenizers.make_byte_tokenizer()
    new_tokenizer.save_pretrained(tmp_path / "tokenizer")
    everything = (
        "".join(map(chr, range(0x800))) + "\r\n \U0001f600 中文 <eos> def f(x):\n\treturn x"
    )
    for tokenizer in (
        new_tokenizer,
        transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer"),
    ):
        ids = tokenizer(everything)["input_ids"]
        assert ids == list(everything.encode())
        assert tokenizer.decode(ids) == everything
        assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<eos>", 256, 257)
    assert sorted(new_tokenizer.get_vocab().values()) == list(range(257))


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path):
    assert len(tokenizers.load("bytes")) == 257
    with pytest.raises(UserError, match="cannot be loaded"):
        tokenizers.load("nowhere")
    for missing in (f"{tmp_path}/none", "./none", "a/b/c"):
        with pytest.raises(UserError, match="no such folder"):
            tokenizers.load(missing)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        tokenizers.load(str(tmp_path / "broken"))
    empty = library.Tokenizer(library.models.BPE())
    transformers.PreTrainedTokenizerFast(tokenizer_object=empty).save_pretrained(tmp_path / "empty")
    with pytest.raises(UserError, match="vocabulary"):
        tokenizers.load(str(tmp_path / "empty"))
