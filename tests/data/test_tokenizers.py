"""Tests of loading tokenizers."""

import contextlib
import io
import json

import pytest
import tokenizers as library
import transformers
from tokenizers import decoders, normalizers

from jaxsp.core.errors import UserError
from jaxsp.data import tokenizers
from tests.data import chats


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


TEXT = "<s>it's  12345 e\u0301\n\n\t\u4e2d\u6587 \U0001f600</s> x"


def write_folder(path, backend, model_type, **fields):
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return str(path)


def load(folder):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        tokenizer = tokenizers.load(folder)
    return tokenizer, output.getvalue().splitlines()


def metaspace_backend(**split):
    """Returns a tokenizer of characters and bytes in SentencePiece's notation."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581x12"]
    model = library.models.BPE(
        {token: index for index, token in enumerate(vocab)},
        [],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = library.Tokenizer(model)
    for name, component in split.items():
        setattr(backend, name, component)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        ("qwen2", "LlamaTokenizerFast"),
        ("llama", "Qwen2Tokenizer"),
        ("llama", "GPT2Tokenizer"),
    ],
)
def test_another_pre_tokenizer_than_that_of_the_class_is_kept(
    tmp_path, model_type, tokenizer_class
):
    own = chats.tokenizer()  # splits digits by three
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_folder(
        tmp_path / "m",
        own.backend_tokenizer,
        model_type,
        **({"tokenizer_class": tokenizer_class} if tokenizer_class else {}),
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=template,
    )
    loaded, notes = load(folder)
    assert loaded(TEXT)["input_ids"] == own(TEXT)["input_ids"]
    assert loaded.decode(loaded("\u4e2d 12")["input_ids"]) == "\u4e2d 12"
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "<|im_end|>")
    assert loaded.chat_template == template
    assert len(loaded) == len(own), "the class would add tokens"
    assert all(folder in note for note in notes)
    assert bool(notes) == (tokenizer_class != "GPT2Tokenizer"), "it gives the same tokens"


def test_special_tokens_that_only_the_class_names_are_kept(tmp_path):
    backend = metaspace_backend(
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    )
    folder = write_folder(tmp_path / "m", backend, "llama", tokenizer_class="LlamaTokenizer")
    loaded, _ = load(folder)
    assert loaded.tokenize("<s> x</s>x") == ["<s>", *"\u2581\u2581x", "</s>", *"\u2581x"]
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == ("<s>", "</s>", "<unk>")


def test_tokenizers_of_mistral_split_text_as_mistral_does(tmp_path):
    backend = chats.tokenizer().backend_tokenizer
    folder = write_folder(tmp_path / "other", backend, "mistral")
    assert load(folder)[1] == []
    tokenizers.correct_file(tmp_path / "other")
    before = (tmp_path / "other/tokenizer.json").read_bytes()
    backend.add_special_tokens(["[AVAILABLE_TOOLS]"])
    folder = write_folder(tmp_path / "m", backend, "mistral", tokenizer_class="LlamaTokenizer")
    loaded, notes = load(folder)
    (note,) = notes
    assert "fix_mistral_regex" in note
    pieces = loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str("eBay mL 123 don't")
    expected = ["e", "Bay", "\u0120m", "L", "\u0120", "1", "2", "3", "\u0120don", "'t"]
    assert [piece for piece, _ in pieces] == expected
    # as in transformers
    fixed = type(loaded)._patch_mistral_regex(
        library.Tokenizer.from_file(f"{folder}/tokenizer.json"),
        folder,
        is_local=True,
        fix_mistral_regex=True,
    )
    assert fixed.to_str() == loaded.backend_tokenizer.to_str()
    tokenizers.correct_file(tmp_path / "m")
    corrected, notes = load(folder)
    assert notes == []
    assert corrected.backend_tokenizer.to_str() == loaded.backend_tokenizer.to_str()
    assert (tmp_path / "other/tokenizer.json").read_bytes() == before
