"""Tests of tokenizers whose tokenizer.json transformers' classes would change."""

import contextlib
import io
import json

import pytest
import tokenizers as library
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from jaxsp.data import tokenizers
from tests.data import chats
from tests.messages import assert_refused

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
        ("qwen2", "PreTrainedTokenizerFast"),
        ("qwen3", None),
        ("llama", "Qwen2Tokenizer"),
        ("gemma2", "Qwen2Tokenizer"),
        ("cohere2", None),
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


def qwen_backend():
    """Returns a tokenizer with the components that Qwen's files have."""
    backend = chats.tokenizer(normalizer=normalizers.NFC()).backend_tokenizer
    from transformers.models.qwen2 import tokenization_qwen2

    split = library.Regex(tokenization_qwen2.PRETOKENIZE_REGEX)
    options = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(**options)]
    )
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    backend.decoder = decoders.ByteLevel(**options)
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def gemma_backend():
    backend = metaspace_backend(
        normalizer=normalizers.Replace(" ", "\u2581"),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
    )
    backend.add_special_tokens(["<bos>", "<eos>", "<pad>", "<mask>"])
    return backend


@pytest.mark.parametrize(
    ("make_backend", "model_type", "fields"),
    [
        (qwen_backend, "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}),
        (qwen_backend, "qwen3", {}),
        (gemma_backend, "gemma3_text", {"tokenizer_class": "GemmaTokenizerFast"}),
        (
            lambda: metaspace_backend(
                pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            ),
            "mistral",
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"},
        ),
        (lambda: chats.tokenizer().backend_tokenizer, "llama", {}),
    ],
)
def test_files_that_agree_with_their_class_have_no_note(tmp_path, make_backend, model_type, fields):
    backend = make_backend()
    loaded, notes = load(write_folder(tmp_path / "m", backend, model_type, **fields))
    assert notes == []
    text = TEXT.removeprefix("<s>")
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert "fix_mistral_regex" not in loaded.init_kwargs


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


@pytest.mark.parametrize("field", ["model_max_length", "padding_side"])
def test_a_field_of_a_wrong_type_is_refused(tmp_path, field):
    folder = write_folder(
        tmp_path / "m", metaspace_backend(), "llama", **{field: {"tokens": "many"}}
    )
    with assert_refused("tokenizer.json", "cannot be loaded"):
        load(folder)
