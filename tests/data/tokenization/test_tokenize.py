"""Records become tokens, once."""

import json
import subprocess
import sys

import datasets
import pytest
import tokenizers as library
import transformers

from jaxsp.core.errors import UserError, at
from jaxsp.data.chat.chat import RenderedRecord
from jaxsp.data.data_config import DataConfig
from jaxsp.data.ingest import cache, sources
from jaxsp.data.packing import summary
from jaxsp.data.packing.row_reader import Documents
from jaxsp.data.tokenization import tokenize as text
from jaxsp.data.tokenization import tokenizers
from tests.data.chat import chats
from tests.messages import assert_names

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
    return tokenize(*args, **kwargs).dataset["tokens"][:]


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


def test_conversations_and_completions_have_labels_unless_train_on_is_all(tmp_path):
    tokenizer = chats.tokenizer()
    write(tmp_path / "a.jsonl", CHAT)
    write(tmp_path / "b.jsonl", {"prompt": "q", "completion": " x"})
    for name, format, said in (
        ("a.jsonl", "messages", "x<|im_end|>\n"),
        ("b.jsonl", "prompt_completion", " x</s>"),
    ):
        actual = tokenize(
            name, format=format, tokenizer=tokenizer, chat_template=chats.CHATML
        ).dataset[0]
        assert len(actual["labels"]) == len(actual["tokens"])
        assert tokenizer.decode([label for label in actual["labels"] if label != -100]) == said
        everything = tokenize(
            name, format=format, tokenizer=tokenizer, chat_template=chats.CHATML, train_on="all"
        ).dataset
        assert set(everything.column_names) == {"place", "problem", "tokens", "bare_answers"}
        assert everything["tokens"][0] == actual["tokens"]


def test_the_same_records_are_tokenized_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    first = tokens("a.txt")

    def encode(*_, **__):
        raise RuntimeError("tokenized again")

    monkeypatch.setattr(text, "encode_records", encode)
    monkeypatch.setattr(cache, "compute_stats", encode)
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


def test_the_digest_depends_on_tokens_and_labels_and_not_on_chunks_or_files(tmp_path):
    chunks = [[[1, 2, 3], [4]], [[5, 6]]]

    def digest(chunks, labels=None):
        tables = [
            datasets.Dataset.from_dict({"tokens": chunk}, features=features("tokens"))
            for chunk in chunks
        ]
        result = datasets.concatenate_datasets(tables)
        if labels is not None:
            column = datasets.Dataset.from_dict({"labels": labels}, features=features("labels"))
            result = datasets.concatenate_datasets([result, column], axis=1)
        return cache.compute_stats(result).digest

    def features(name):
        return datasets.Features({name: datasets.LargeList(datasets.Value("int32"))})

    same = digest(chunks)
    assert digest([[*chunks[0], *chunks[1]]]) == digest([[[1, 2, 3]], [[4], [5, 6]]]) == same
    labels = [[-100, 2, 3], [4], [5, 6]]
    others = [[[[1, 2], [3, 4], [5, 6]]], [[[1, 2, 3], [4], [5, 7]]], [[[4], [1, 2, 3], [5, 6]]]]
    digests = [
        same,
        *map(digest, others),
        digest(chunks, labels),
        digest(chunks, [[1, 2, 3], *labels[1:]]),
    ]
    assert len(set(digests)) == len(digests)
    write(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": [3]})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/b.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    assert (
        tokenize("a.jsonl", format="tokens").stats.digest
        == tokenize("elsewhere/b.jsonl", format="tokens").stats.digest
    )


@pytest.mark.e2e
def test_workers_change_no_token(tmp_path):
    """JAX has started threads, so that a fork would warn; there is no progress bar in a log."""
    write(tmp_path / "a.jsonl", *({"text": f"document {number}"} for number in range(20)))
    program = """
import concurrent.futures
import jax
from jaxsp.data.data_config import DataConfig
from jaxsp.data.ingest import sources
from jaxsp.data.tokenization import tokenize, tokenizers
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
print([workers, tokenized.stats.digest, tokenized.dataset["tokens"][:]])
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
    assert eval(process.stdout) == [[2], expected.stats.digest, expected.dataset["tokens"][:]]


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    write(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3, 300]})
    with pytest.raises(
        UserError,
        match=r"data\.train\.0\.source = a\.jsonl: .*line 3: .*tokens.* 300\b.*vocab_size.* 255\b",
    ):
        tokenize("a.jsonl", format="tokens", vocab_size=256)
    assert len(tokenize("a.jsonl", format="tokens", vocab_size=301).dataset) == 3
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
        assert result.dataset["bare_answers"] == [0, 1, 2]
        results.append(result)
        counts = Documents([result.dataset], source_names=["a"]).sources
        assert [source.num_bare_answers for source in counts] == [3]
        options = asked("a.jsonl", earlier_reasoning=earlier)
        (note,) = summary.describe_bare_answers(counts, options)
        assert_names(note, "a", "3", f"data.earlier_reasoning={earlier}")
    assert len({result.stats.digest for result in results}) == 3
    texts = [how["tokenizer"].decode(result.dataset["tokens"][0]) for result in results]
    assert [text[:5] for text in texts] == ["25 No", "25 No", "02 Ja"]
