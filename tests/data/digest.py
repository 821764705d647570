"""Digests of all rows of corpora of every format: what a refactoring must not change.

`python -m tests.data.digest` prints a line for each corpus; compare it with the line before.
"""

import gzip
import hashlib
import itertools
import json
import os
import pathlib
import random
import tempfile

import datasets
import pyarrow as pa
from pyarrow import feather, parquet

from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.core.layout import KEPT_ORDER
from jaxsp.data import dataset
from jaxsp.data.loader import RowPlacement
from jaxsp.run import config_file, data_sets
from jaxsp.system import device_mesh
from tests.data import chats, test_chat

ROW = 256

ANSWER = {"role": "assistant", "content": "<think>hm</think>x"}

TEMPLATES = {
    name: getattr(chats, name)
    for name in ("CHATML", "MARKED", "HEADERS", "INST", "TURNS", "MARKERS", "THINKING")
}

MORE_TEMPLATES = {
    name: getattr(test_chat, name)
    for name in ("MARKED_THINKING", "MARKED_LAST", "HALF_PROMPTED", "UNPROMPTED", "THOUGHT")
}


def write_corpora() -> None:
    draw = random.Random(0)
    words = [" ".join(draw.choices(chats._WORDS, k=draw.randint(1, 40))) for _ in range(60)]
    texts = [{"text": text, "id": number} for number, text in enumerate(words)]
    talks = [{"messages": talk} for talk in chats.conversations(60)]
    talks += [{"messages": [talk["messages"][-2], ANSWER] * 3} for talk in talks[:20]]
    plain = [{"prompt": text, "completion": f" {text[::-1]}"} for text in words]
    split = [
        {"prompt": talk["messages"][:-1], "completion": talk["messages"][-1:]} for talk in talks
    ]
    pairs = [
        record | {"rejected": [{"role": "assistant", "content": text}], "chosen": completion}
        for record, text in zip(split, itertools.cycle(words))
        if (completion := record["completion"])
    ]
    pairs = [
        {name: value for name, value in pair.items() if name != "completion"} for pair in pairs
    ]
    ids = [
        {
            "input_ids": (ids := draw.choices(range(200), k=draw.randint(0, 400))),
            "labels": ids[::-1],
        }
        for _ in range(60)
    ]
    corpora = {
        "text": texts,
        "bad": [*texts[:9], {"body": "x"}, {"text": 7}, {"text": ""}, {"text": "x", "note": "a b"}],
        "messages": talks,
        "plain": plain,
        "split": split,
        "preference": pairs,
        "scored": [
            pair | {"ref_chosen_logps": -number, "ref_rejected_logps": -0.5}
            for number, pair in enumerate(pairs)
        ],
        "unpaired": [record | {"label": draw.random() < 0.5} for record in split],
        "text pairs": [
            {"prompt": text, "chosen": f" {text[::-1]}", "rejected": f" {text[3:]}."}
            for text in words
        ],
        "text unpaired": [record | {"label": draw.random() < 0.5} for record in plain],
        "tokens": [{"input_ids": record["input_ids"]} for record in ids],
        "labels": ids,
    }
    for name, records in corpora.items():
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        pathlib.Path(f"{name}.jsonl").write_text(lines)
        pathlib.Path(f"{name}.json").write_text(json.dumps(records, indent=1))
        pathlib.Path(f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        pathlib.Path(f"{name}.cut.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-99])
        if name in ("text", "plain", "tokens", "labels"):
            table = pa.Table.from_pylist(records)
            parquet.write_table(table, f"{name}.parquet", row_group_size=20)
            feather.write_feather(table, f"{name}.arrow", chunksize=20)
            datasets.Dataset.from_list(records).save_to_disk(f"{name}.saved")
            for kind, separator in (("csv", ","), ("tsv", "\t")):
                datasets.Dataset.from_list(records).to_csv(f"{name}.{kind}", sep=separator)
    pathlib.Path("texts").mkdir()
    for number, text in enumerate(words):
        pathlib.Path(f"texts/{number:02}.txt").write_text(text)


def list_cases() -> dict[str, tuple[list[dict[str, object]], dict[str, object]]]:
    """Sources, and other fields of `data`, of each corpus."""
    cases = {}
    kinds = "jsonl json jsonl.gz cut.jsonl.gz csv tsv parquet arrow saved".split()
    formats = {"text": "text", "plain": "prompt_completion", "tokens": "tokens", "labels": "tokens"}
    for name, kind in itertools.product(formats, kinds):
        cases[f"{name}.{kind}"] = ([{"source": f"{name}.{kind}", "format": formats[name]}], {})
    text = {"source": "text.jsonl", "format": "text"}
    cases["files"] = ([{"source": "texts/*.txt", "format": "text"}], {})
    cases["part"] = ([text | {"split": "train[10:50%]"}], {"eval": [text | {"split": "train[:9]"}]})
    for how in ("error", "skip"):
        cases[f"bad {how}"] = ([text | {"source": "bad.jsonl"}], {"on_bad_record": how})
    for long in ("split", "truncate", "drop", "error"):
        plain = {"source": "plain.jsonl", "format": "prompt_completion"}
        cases[f"long {long}"] = ([plain], {"long_documents": long, "eval_fraction": 0.2})
    cases["mixed"] = (
        [
            text | {"weight": 3.0},
            {"source": "labels.jsonl", "format": "tokens", "weight": 1.0},
            {"source": "plain.jsonl", "format": "prompt_completion", "weight": 0.5},
        ],
        {"eval_fraction": 0.1},
    )
    for name, format in (("text pairs", "preference"), ("text unpaired", "unpaired")):
        source = {"source": f"{name}.jsonl", "format": format}
        cases[name] = ([source], {"long_documents": "drop"})
        cases[f"{name} truncated"] = ([source], {"long_documents": "truncate"})
        cases[f"{name} error"] = ([source], {"long_documents": "error"})
    chat_formats = {
        "messages": "messages",
        "split": "prompt_completion",
        "preference": "preference",
        "scored": "preference",
        "unpaired": "unpaired",
    }
    for template, (name, format), reasoning in itertools.product(
        TEMPLATES | MORE_TEMPLATES, chat_formats.items(), ("keep", "no_loss")
    ):
        if template in MORE_TEMPLATES and (name != "messages" or reasoning == "no_loss"):
            continue
        fields = {
            "chat_template": (TEMPLATES | MORE_TEMPLATES)[template],
            "earlier_reasoning": reasoning,
        }
        if format in ("preference", "unpaired"):
            fields["long_documents"] = "drop" if reasoning == "keep" else "truncate"
        for train_on in ("assistant", "all") if name in ("messages", "split") else ("assistant",):
            cases[f"{name} {template} {reasoning} {train_on}"] = (
                [{"source": f"{name}.jsonl", "format": format}],
                fields | {"on_bad_record": "skip", "train_on": train_on},
            )
    return cases


def digest(train: list[dict[str, object]], fields: dict[str, object]) -> str:
    """Digest of all rows of a corpus, and of the text about them; or its problems."""
    weights = {"steps": 9} if len(train) > 1 else {"epochs": 2}
    pairs = {"preference": {"type": "dpo"}, "unpaired": {"type": "kto"}}
    config = config_file.parse(
        {
            "run": {"directory": "unused", **weights},
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": train, "row_tokens": ROW, "num_workers": 1, **fields},
            "batch": {"rows_per_step": 4},
            "optimizer": {"learning_rate": 0.1},
            "objective": pairs.get(str(train[0]["format"]), {"type": "sft"}),
        }
    )
    seen = hashlib.sha256()
    shown = ""
    try:
        problems = ProblemCollector()
        opened = data_sets.open_sources(config, for_training=True, problems=problems)
        problems.raise_if_any()
        made, evals = data_sets.make_data_sets(
            opened, config, chats.tokenizer(), vocab_size=999, for_training=True
        )
    except UserError as error:
        return " | ".join(error.problems)
    assert made is not None
    mesh = device_mesh.make_mesh({"replica": 1, "data": 1, "seq": 1})
    placement = RowPlacement(
        mesh=mesh, layout=KEPT_ORDER, rows_per_step=4, rows_per_microbatch=2, has_ring_steps=False
    )
    for data in (made, *evals):
        seen.update(repr(data.fingerprint(config.data, seed=0)).encode())
        documents = range(len(data.documents.lengths))
        seen.update(repr([data.documents.find_origin(number) for number in documents]).encode())
        schedule = data.make_schedule(4, num_steps=20)
        shown += repr(dataset.describe_data(data, config.data, schedule))
        shown += dataset.describe_documents(data)
        loader = data.make_loader(schedule, placement)
        for step in range(20):
            batch = loader.read_step(step)
            seen.update(repr((batch.counts.tokens_per_source, batch.counts.imbalance)).encode())
            for name, blocks in sorted(batch.blocks.items()):
                seen.update(name.encode() + b"".join(map(bytes, blocks.values())))
            if batch.pairs is not None:
                seen.update(
                    repr((bytes(batch.pairs.references_P2), batch.counts.documents_P2)).encode()
                )
    text = hashlib.sha256(shown.encode()).hexdigest()[:8]
    return f"{seen.hexdigest()[:32]} {text} {dataset.describe_documents(made)}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        datasets.config.HF_DATASETS_CACHE = f"{folder}/cache"
        write_corpora()
        for case, (sources, options) in list_cases().items():
            print(f"{case}: {digest(sources, options)}".replace(folder, ""), flush=True)
