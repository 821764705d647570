"""Records become tokens, once."""

import concurrent.futures
import errno
import json
import os
import subprocess
import sys
import time
import types
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import tokenizers as library
import transformers

from jaxsp.core.errors import UserError, at
from jaxsp.data import dataset, sources, store, tokenizers
from jaxsp.data import tokenize as text
from jaxsp.data.chat import RenderedRecord
from jaxsp.data.data_config import DataConfig
from jaxsp.data.documents import Documents
from jaxsp.data.tokenizers import TextEncoder
from jaxsp.run import export_command
from tests.data import chats
from tests.data.source_configs import to_columns
from tests.messages import assert_names, assert_refused

FIELD = "data.train.0.source"

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]

CHAT = {"messages": TALK}


pytestmark = pytest.mark.usefixtures("own_cache")


def asked(name, format="text", **data):
    source = {"source": name, "format": format}
    return DataConfig.model_validate({"train": [source], "row_tokens": 8, "num_workers": 1, **data})


def tokenize(name, *, format="text", tokenizer=None, vocab_size=100_000, **data):
    config = asked(name, format, **data)
    with at(FIELD, name):
        return text.tokenize_dataset(
            sources.read(config.train[0], data=config),
            tokenizer=tokenizer or tokenizers.make_byte_tokenizer(),
            vocab_size=vocab_size,
        )


def tokens(*args, **kwargs):
    return to_columns(tokenize(*args, **kwargs))["tokens"]


def words_tokenizer(**special):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}
    backend = library.Tokenizer(library.models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    if special.get("bos_token"):
        backend.post_processor = library.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_an_end_is_added_once_and_special_tokens_are_the_tokenizers_own(tmp_path):
    texts = ("one two", "two </s>", "", "<s> one", "<s> two </s> \n", "</s> one")
    write(tmp_path / "a.jsonl", *({"text": words} for words in texts))
    both = words_tokenizer(bos_token="<s>", eos_token="</s>")
    assert tokens("a.jsonl", tokenizer=both) == [
        [1, 3, 4, 2],
        [1, 4, 2],
        [],
        [1, 3, 2],
        [1, 4, 2],
        [1, 2, 3, 2],
    ]
    ends = [[3, 4, 2], [4, 2], [], [1, 3, 2], [1, 4, 2], [2, 3, 2]]
    assert tokens("a.jsonl", tokenizer=words_tokenizer(eos_token="</s>")) == ends
    assert tokens("a.jsonl", tokenizer=words_tokenizer())[:2] == [[3, 4], [4, 2]]


@pytest.mark.parametrize(
    ("single", "eos", "expected"),
    [
        ("$A <s>", "</s>", [3, 2]),  # the end token replaces that of the post-processor
        ("$A <s>", None, [3, 1]),
        ("$A <s> </s>", "</s>", [3, 1, 2]),
        ("<s> </s> $A", None, [1, 2, 3]),
    ],
)
def test_a_text_has_one_end(single, eos, expected):
    tokenizer = words_tokenizer(eos_token=eos)
    tokenizer.backend_tokenizer.post_processor = library.processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    record = RenderedRecord(text="one", is_plain=True)
    labeled = RenderedRecord(text="one", loss_spans=((0, 3),), is_plain=True)
    results = chats.encode([record, labeled], tokenizer)
    assert [result[0].tolist() for result in results] == [expected, expected]


@pytest.mark.parametrize(
    ("prompt", "is_plain", "expected"),
    [("one", True, [1, 3]), ("<s> one", True, [1, 3]), ("one", False, [3]), ("", True, [1])],
)
def test_a_prompt_has_the_tokens_before_a_text_and_no_end(prompt, is_plain, expected):
    tokenizer = words_tokenizer(bos_token="<s>", eos_token="</s>")
    assert TextEncoder(tokenizer).encode_prompt(prompt, is_plain=is_plain) == expected


def test_rendered_chats_get_no_second_frame():
    """The text of an end token may be followed by white space, which is several tokens."""
    tokenizer = chats.tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.backend_tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    for end in ("<|im_end|>", "<|im_end|>\n", "<|im_end|> \n\t \r\n"):
        prompt = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        text = prompt + "yo" + end
        whole = RenderedRecord(text=text, is_plain=True)
        part = RenderedRecord(text=text, loss_spans=((len(prompt), len(text)),), is_plain=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        (all_ids, _), (same_ids, labels) = chats.encode([whole, part], tokenizer)
        assert all_ids.tolist() == same_ids.tolist() == ids
        assert tokenizer.decode(labels[labels != -100]) == "yo" + end
        unfinished = RenderedRecord(text=f"{text}more", is_plain=True)
        ((ids, _),) = chats.encode([unfinished], tokenizer)
        assert tokenizer.decode(ids) == f"{text}more<|im_end|>"


def test_a_vocabulary_without_an_unknown_token(tmp_path):
    """Letters of DNA; another letter is refused with its line."""
    backend = library.Tokenizer(library.models.WordLevel({"<e>": 0, "A": 1, "C": 2, "G": 3}))
    backend.pre_tokenizer = library.pre_tokenizers.Split("", "isolated")
    letters = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    letters.save_pretrained(tmp_path / "letters")
    letters = tokenizers.load(str(tmp_path / "letters"))
    write(tmp_path / "a.jsonl", {"text": "GAC"}, {"text": "A<e>"})
    assert tokens("a.jsonl", tokenizer=letters) == [[3, 1, 2, 0], [1, 0]]
    write(tmp_path / "b.jsonl", {"prompt": "GA", "completion": "C"})
    source = to_columns(tokenize("b.jsonl", format="prompt_completion", tokenizer=letters))
    assert source["labels"] == [[-100, -100, 2, 0]]
    write(tmp_path / "c.jsonl", {"text": "GAC"}, {"text": "GATC"})
    with pytest.raises(UserError, match=r"c\.jsonl, line 2: .*UNK"):
        tokens("c.jsonl", tokenizer=letters)


def test_ids_of_text_are_those_of_the_tokenizer(tmp_path):
    """Also of one that is not fast, and of one that was saved with truncation and padding."""
    # ByT5 warns of an end token inside a text
    lines = [
        message["content"].replace("</s>", "")
        for chat in chats.conversations(20, alternating=True)
        for message in chat
    ]
    write(tmp_path / "a.jsonl", *({"text": words} for words in lines))
    cut = chats.tokenizer()
    cut.backend_tokenizer.enable_truncation(3)
    cut.backend_tokenizer.enable_padding(length=5)
    for tokenizer in (
        cut,
        chats.tokenizer(),
        tokenizers.make_byte_tokenizer(),
        transformers.ByT5Tokenizer(),
    ):
        end = tokenizer.eos_token_id
        assert tokens("a.jsonl", tokenizer=tokenizer) == [
            ids if ids[-1] == end else [*ids, end] for ids in tokenizer(lines)["input_ids"]
        ]


def test_records_of_tokens_are_unchanged(tmp_path):
    write(tmp_path / "a.jsonl", {"input_ids": [1, 2, 256], "labels": [-100, 2, 256]})
    assert to_columns(tokenize("a.jsonl", format="tokens")) == {
        "place": ["a.jsonl, line 1"],
        "problem": [None],
        "num_tokens": [3],
        "tokens": [[1, 2, 256]],
        "labels": [[-100, 2, 256]],
    }


def test_conversations_and_completions_have_labels_unless_train_on_is_all(tmp_path):
    tokenizer = chats.tokenizer()
    write(tmp_path / "a.jsonl", CHAT)
    write(tmp_path / "b.jsonl", {"prompt": "q", "completion": " x"})
    for name, format, said in (
        ("a.jsonl", "messages", "x<|im_end|>\n"),
        ("b.jsonl", "prompt_completion", " x</s>"),
    ):
        how = {"format": format, "tokenizer": tokenizer, "chat_template": chats.CHATML}
        actual = to_columns(tokenize(name, **how))
        assert len(actual["labels"][0]) == len(actual["tokens"][0])
        assert tokenizer.decode([label for label in actual["labels"][0] if label >= 0]) == said
        everything = to_columns(tokenize(name, **how, train_on="all"))
        assert "labels" not in everything
        assert everything["tokens"] == actual["tokens"]


def test_bad_records_are_named_with_their_line_or_skipped(tmp_path):
    refused = {"messages": [{"role": "user", "content": "q"}, {"role": "user", "content": "q"}]}
    write(tmp_path / "a.jsonl", CHAT, {"messages": "hi"}, refused, CHAT)
    how = {"format": "messages", "tokenizer": chats.tokenizer(), "chat_template": chats.TURNS}
    write(tmp_path / "b.jsonl", CHAT, refused, CHAT)
    with pytest.raises(UserError, match=r"b\.jsonl, line 2: .*Conversation roles must alternate"):
        tokenize("b.jsonl", **how)
    for _ in range(2):  # from the cache too
        result = to_columns(tokenize("a.jsonl", **how, on_bad_record="skip"))
        problems = [bool(problem) for problem in result["problem"]]
        assert problems == [False, True, True, False]
        assert [bool(ids) for ids in result["tokens"]] == [True, False, False, True]
        assert result["labels"][1:3] == [[], []]
    with pytest.raises(UserError, match=r"max_bad_records"):
        tokenize("a.jsonl", **how, on_bad_record="skip", max_bad_records=1)
    write(tmp_path / "a.jsonl", refused, refused)
    with assert_refused("line 1", "no record contains messages"):
        tokenize("a.jsonl", **how, on_bad_record="skip")


def test_a_killed_process_that_tokenizes_is_an_error_of_its_source(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", {"text": "x"}, {"text": "y"})

    def fail(*_, **__):
        raise BrokenProcessPool

    monkeypatch.setattr(concurrent.futures.ProcessPoolExecutor, "submit", fail)
    with pytest.raises(UserError, match=rf"{FIELD} = a.jsonl: .*killed.*data.num_workers=1"):
        tokenize("a.jsonl", num_workers=2)


def test_the_same_records_are_tokenized_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    first = tokens("a.txt")

    def encode(*_, **__):
        raise RuntimeError("tokenized again")

    monkeypatch.setattr(text, "encode_records", encode)

    assert (
        tokens("a.txt")
        == tokens("a.txt", num_workers=3)
        == tokens("a.txt", num_workers=None)
        == first
    )
    with pytest.raises(RuntimeError, match="again"):
        tokenize("a.txt", tokenizer=words_tokenizer())
    (tmp_path / "a.txt").write_text("other text")
    with pytest.raises(RuntimeError, match="again"):
        tokenize("a.txt")


def test_concurrent_processes_tokenize_a_source_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    calls = []
    encode = text.encode_batch

    def slow(*arguments, **others):
        calls.append(arguments)
        time.sleep(0.3)
        return encode(*arguments, **others)

    monkeypatch.setattr(text, "encode_batch", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(tokens, ["a.txt"] * 4))
    assert results == [[[*b"one", 256]]] * 4
    assert len(calls) == 1


def test_long_and_many_records_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_BATCH_SIZE", 100)
    texts = ["x" * (number % 70) + str(number) for number in range(50)]
    write(tmp_path / "a.jsonl", *({"text": words} for words in texts))
    result = tokenize("a.jsonl")
    assert to_columns(result)["tokens"] == [[*words.encode(), 256] for words in texts]
    assert result.records["place"].num_chunks > 5


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_cache_disk_is_an_error_that_names_the_cache(tmp_path, number):
    def fail():
        raise OSError(number, os.strerror(number))
        yield

    with pytest.raises(UserError, match=f"HF_DATASETS_CACHE = {tmp_path}:.* MiB"):
        store.open_or_build(tmp_path / "jaxsp" / "0123", fail)
    number = errno.EISDIR
    with pytest.raises(IsADirectoryError):
        store.open_or_build(tmp_path / "jaxsp" / "0123", fail)
    assert not list(tmp_path.rglob("0123/*")), "half a file would be taken for a whole one"


def test_records_are_tokenized_again_when_tokenizer_or_template_changes(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", CHAT)
    tokenizer = chats.tokenizer()
    results = []
    encode = text.encode_records
    monkeypatch.setattr(text, "encode_records", lambda *args: results.append(1) or encode(*args))
    for number, change in enumerate(
        [
            {"chat_template": chats.CHATML},
            {"chat_template": chats.TURNS},
            {"chat_template": chats.CHATML, "train_on": "all"},
        ],
        1,
    ):
        for _ in range(2):
            tokenize("a.jsonl", format="messages", tokenizer=tokenizer, **change)
            assert len(results) == number
    monkeypatch.setattr(text.importlib.metadata, "version", lambda name: "another")
    tokenize("a.jsonl", format="messages", tokenizer=tokenizer, chat_template=chats.CHATML)
    assert len(results) == 4


def test_a_template_kept_in_a_tokenizer_gives_the_cached_tokens(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", CHAT)
    write(tmp_path / "b.jsonl", {"text": "x"})
    results = []
    encode = text.encode_records
    monkeypatch.setattr(text, "encode_records", lambda *args: results.append(1) or encode(*args))
    first = tokens(
        "a.jsonl", format="messages", tokenizer=chats.tokenizer(), chat_template=chats.CHATML
    )
    kept = chats.tokenizer()
    kept.chat_template = chats.CHATML
    assert tokens("a.jsonl", format="messages", tokenizer=kept) == first
    tokens("b.jsonl", tokenizer=kept)
    assert len(results) == 2
    kept.chat_template = chats.TURNS
    tokens("b.jsonl", tokenizer=kept)
    assert len(results) == 2, "text needs no template"
    assert tokens("a.jsonl", format="messages", tokenizer=kept) != first
    assert len(results) == 3


THINKING = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and mood is defined %}{{ mood }}{{ level }}{% endif -%}"
    "{{ message.content + '<|im_end|>\\n' }}{%- endfor -%}"
)


def test_variables_of_the_config_reach_the_template_and_those_of_a_record_win(tmp_path):
    write(
        tmp_path / "a.jsonl",
        {"messages": TALK},
        {"messages": TALK, "chat_template_kwargs": {"mood": "sad"}},
        {"prompt": TALK[:1], "completion": TALK[1:]},
    )
    tokenizer = chats.tokenizer()

    def shown(**data):
        data = {"tokenizer": tokenizer, "chat_template": THINKING, "on_bad_record": "skip", **data}
        both = [*tokens("a.jsonl", format="messages", train_on="all", **data)]
        both += tokens("a.jsonl", format="prompt_completion", train_on="all", **data)
        texts = [tokenizer.decode(ids) for ids in both if len(ids)]
        return [text.split("assistant\n")[1].split("<|im_end|>")[0] for text in texts]

    assert shown() == ["x", "sadx", "x"]
    kwargs = {"mood": 'it\'s \\ "so"\n', "level": 2}
    mood = f"{kwargs['mood']}2"
    assert shown(chat_template_kwargs=kwargs) == [f"{mood}x", "sad2x", f"{mood}x"]
    for name in ("moo", "tools"):
        with pytest.raises(UserError, match=rf"data\.chat_template_kwargs\.{name}\b"):
            shown(chat_template_kwargs={name: 1})


@pytest.mark.parametrize("is_own", [False, True])
def test_an_export_has_the_variables_as_defaults_of_its_template(tmp_path, is_own):
    tokenizer = chats.tokenizer()
    tokenizer.chat_template = chats.CHATML if is_own else THINKING
    tokenizer.save_pretrained(tmp_path / "out")
    data = {"chat_template_kwargs": {"mood": False}} | (
        {"chat_template": THINKING} if is_own else {}
    )
    config = types.SimpleNamespace(data=asked("a.jsonl", "messages", **data))
    export_command.write_chat_template(config, tmp_path / "out")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    answer = [{"role": "assistant", "content": "x"}]
    rendered = loaded.apply_chat_template(answer, tokenize=False)
    assert rendered == "<|im_start|>assistant\nFalsex<|im_end|>\n"
    assert "sadx" in loaded.apply_chat_template(answer, tokenize=False, mood="sad")


@pytest.mark.e2e
def test_workers_change_no_token(tmp_path):
    """JAX has started threads, so that a fork would warn; there is no progress bar in a log."""
    write(tmp_path / "a.jsonl", *({"text": f"document {number}"} for number in range(20)))
    program = """
import concurrent.futures
import jax
from jaxsp.data.data_config import DataConfig
from jaxsp.data import sources
from jaxsp.data import tokenize, tokenizers
jax.devices()
source = {"source": "a.jsonl", "format": "text"}
data = {"train": [source], "row_tokens": 8, "num_workers": 2}
data = DataConfig.model_validate(data)
make_pool = concurrent.futures.ProcessPoolExecutor
workers = []
def count_workers(num_workers, **kwargs):
    workers.append(num_workers)
    return make_pool(num_workers, **kwargs)
concurrent.futures.ProcessPoolExecutor = count_workers
records = sources.read(data.train[0], data=data)
tokenized = tokenize.tokenize_dataset(
    records,
    tokenizer=tokenizers.make_byte_tokenizer(),
    vocab_size=257,
)
print([workers, tokenized.digest, tokenized.arrays["tokens"].ids.tolist()])
"""
    (tmp_path / "script.py").write_text(program)  # which no worker may run again
    process = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "os.fork" not in process.stderr, process.stderr
    assert "Reading" not in process.stderr, "a progress bar in a log"
    expected = tokenize("a.jsonl")
    ids = expected.arrays["tokens"].ids.tolist()
    assert eval(process.stdout) == [[2], expected.digest, ids]


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    write(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3, 300]})
    with pytest.raises(
        UserError,
        match=r"data\.train\.0\.source = a\.jsonl: .*line 3: .*tokens.* 300\b.*vocab_size.* 255\b",
    ):
        tokenize("a.jsonl", format="tokens", vocab_size=256, on_bad_record="skip")
    assert len(tokenize("a.jsonl", format="tokens", vocab_size=301).records) == 3
    write(tmp_path / "b.jsonl", {"input_ids": [1, -100], "labels": [1, -100]})
    with pytest.raises(UserError, match=r"b\.jsonl, line 1: .*tokens.* -100\b"):
        tokenize("b.jsonl", format="tokens", vocab_size=256)
    write(
        tmp_path / "c.jsonl",
        {"input_ids": [1], "labels": [-100]},
        {"input_ids": [1, 2], "labels": [-100, -1]},
    )
    with pytest.raises(UserError, match=r"c\.jsonl, line 2: .*labels.* -1\b"):
        tokenize("c.jsonl", format="tokens", vocab_size=256)
    (tmp_path / "d.txt").write_text("x")
    with pytest.raises(UserError, match=r"d\.txt: .*tokens.* 256\b.*vocab_size.* 256\b"):
        tokenize("d.txt", vocab_size=256)


def test_examples_are_encoded_as_in_tokenize_dataset(tmp_path):
    write(tmp_path / "a.jsonl", {"messages": TALK[:1]}, CHAT, CHAT)
    config = asked("a.jsonl", "messages", chat_template=chats.CHATML, on_bad_record="skip")
    how = {"tokenizer": chats.tokenizer()}
    records = sources.read(config.train[0], data=config)
    (example,) = text.encode_examples(records, **how)
    assert len(list(text.encode_examples(records, **how, num_records=5))) == 2
    place, tokens, labels = example
    result = to_columns(text.tokenize_dataset(records, vocab_size=1000, **how))
    expected = [result[name][1] for name in ("place", "tokens", "labels")]
    assert [place, tokens.tolist(), labels.tolist()] == expected
    assert np.any(labels != -100)
    strict = sources.read(
        config.train[0], data=config.model_copy(update={"on_bad_record": "error"})
    )
    with pytest.raises(UserError, match=r"line 1: .*assistant.*data\.on_bad_record=skip"):
        list(text.encode_examples(strict, **how))


DATED = "{{ strftime_now('%d %B') }}:" + chats.THINKING


def test_dates_and_earlier_reasoning_are_parts_of_the_cache_and_counted(tmp_path):
    ask = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "<think>hm</think>x"}
    write(tmp_path / "a.jsonl", *({"messages": [ask, answer] * turns} for turns in (1, 2, 3)))
    how = {"format": "messages", "tokenizer": chats.tokenizer(), "chat_template": DATED}
    results = []
    for earlier, date in (
        ("keep", "2026-11-25"),
        ("no_loss", "2026-11-25"),
        ("keep", "2020-01-02"),
    ):
        result = tokenize("a.jsonl", **how, earlier_reasoning=earlier, chat_template_date=date)
        assert to_columns(result)["bare_answers"] == [0, 1, 2]
        results.append(result)
        counts = Documents([result], source_names=["a"]).sources
        assert [source.num_bare_answers for source in counts] == [3]
        options = asked("a.jsonl", earlier_reasoning=earlier)
        (note,) = dataset.describe_bare_answers(counts, options)
        assert_names(note, "a", "3", f"data.earlier_reasoning={earlier}")
    assert len({result.digest for result in results}) == 3
    texts = [how["tokenizer"].decode(to_columns(result)["tokens"][0]) for result in results]
    assert [text[:5] for text in texts] == ["25 No", "25 No", "02 Ja"]


def test_other_users_may_read_the_cache(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    before = os.umask(0o022)
    try:
        tokenize("a.txt")
    finally:
        os.umask(before)
    result = [file for file in (tmp_path / "cache" / "jaxsp").rglob("*") if file.is_file()]
    assert any(file.name == "tokens" for file in result)
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in result if file.suffix != ".lock")
