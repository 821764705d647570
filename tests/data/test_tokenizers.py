"""Tests of loading tokenizers."""

import pytest
import tokenizers as library
import transformers

from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers


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


def test_serialized_files_exclude_templates_and_do_not_change_with_use():
    def words(**special):
        backend = library.Tokenizer(
            library.models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2}, unk_token="<unk>")
        )
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)

    ends = words(eos_token="</s>")
    before = tokenizers.serialize_files(ends)
    assert (
        before
        == tokenizers.serialize_files(words(eos_token="</s>"))
        != tokenizers.serialize_files(words())
    )
    ends("one")
    assert tokenizers.serialize_files(ends) == before
    for template in ("{{ messages }}", {"default": "{{ messages }}", "tool_use": "{{ tools }}"}):
        ends.chat_template = template
        assert tokenizers.serialize_files(ends) == before


class PanicException(BaseException):
    """Like that of Rust libraries, whose class is not public."""


def test_a_panic_becomes_an_exception_and_other_errors_stay():
    with pytest.raises(RuntimeError, match="retry"), tokenizers.convert_panics():
        raise PanicException("retry limit")
    with pytest.raises(KeyboardInterrupt), tokenizers.convert_panics():
        raise KeyboardInterrupt
