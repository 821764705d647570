"""How fast records become tokens on disk, beside the tokenizer alone: python -m scripts.bench.tokenise [--out FILE.json].

Python's own library is the text, each file a document, and then four questions and answers; a byte-level BPE of
16,384 tokens is trained on it. Both run in one process with one thread, in turns; seconds are those of its core, and the
ratio is the median of theirs. `jaxsp` is all that tokenize.tokenize_dataset does: rendering, tokenising, checking, counting,
and writing what the cache keeps.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import sysconfig
import tempfile
import time
from typing import Any

from jaxsp.config import data_schema
from scripts.bench import machine

VOCAB = 16_384

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.tokenise", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=6)
    parser.add_argument("--out", metavar="FILE.json", type=pathlib.Path)
    given = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = _texts(given.megabytes * 1e6)
    tokenizer = _tokenizer(texts)
    talks = [_conversation(text) for text in texts]
    written = [
        tokenizer.apply_chat_template(record["messages"], tokenize=False) for record in talks
    ]
    cases = []
    for record_format, rendered, records in (
        ("text", texts, [{"text": text} for text in texts]),
        ("messages", written, talks),
    ):
        cases.append(
            {
                "format": record_format,
                **_compare(rendered, records, tokenizer, record_format, given.runs),
            }
        )
        print("  ".join(f"{name} {value}" for name, value in cases[-1].items()), flush=True)
    if given.out:
        machine.write(
            given.out,
            "scripts.bench.tokenise",
            arguments,
            ("transformers", "tokenizers", "datasets"),
            cases=cases,
        )
    return 0


def _compare(
    texts: list[str], records: list[dict[str, Any]], tokenizer: Any, record_format: str, runs: int
) -> dict[str, Any]:
    """The tokenizer alone on the rendered texts, and all of tokenize.tokenize_dataset on their records."""
    alone, whole, num_tokens = [], [], 0
    for _ in range(runs):
        started = time.process_time()
        num_tokens = sum(
            map(len, tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
        )
        alone.append(time.process_time() - started)
        whole.append(_prepare(records, tokenizer, record_format))
    ratios = [a / b for a, b in zip(alone, whole, strict=True)]
    return {
        "documents": len(texts),
        "megabytes": round(sum(len(text.encode()) for text in texts) / 1e6, 2),
        "tokens": num_tokens,
        "encode_batch_tokens_per_s": round(num_tokens / statistics.median(alone)),
        "jaxsp_tokens_per_s": round(num_tokens / statistics.median(whole)),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _texts(num_bytes: float) -> list[str]:
    found: list[str] = []
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if num_bytes <= 0 or "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        num_bytes -= len(text)
        found += [text] if text else []
    return found


def _conversation(text: str) -> dict[str, Any]:
    """A document as four questions and answers."""
    quarter = -(-len(text) // 4)
    parts = [
        text[start : start + quarter].strip() or "pass" for start in range(0, 4 * quarter, quarter)
    ]
    roles = ("user", "assistant")
    return {"messages": [{"role": role, "content": part} for part in parts for role in roles]}


def _tokenizer(texts: list[str]) -> Any:
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet, special = (
        pre_tokenizers.ByteLevel.alphabet(),
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    made.chat_template = CHATML
    return made


def _prepare(records: list[dict[str, Any]], tokenizer: Any, record_format: str) -> float:
    """Seconds of a core that tokenize.tokenize_dataset takes for records that were read before, with an empty cache."""
    import datasets

    from jaxsp.data.ingest import sources
    from jaxsp.data.tokenization import tokenize

    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = pathlib.Path(folder) / "cache"
        path = pathlib.Path(folder) / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        source = {"source": str(path), "format": record_format}
        data = data_schema.DataConfig.model_validate(
            {"train": [source], "row_tokens": 1024, "num_workers": 1}
        )
        (asked,) = data.train
        read = sources.read(asked, data=data, field="data.train.0.source")
        started = time.process_time()
        tokenize.tokenize_dataset(
            read,
            source=asked,
            data=data,
            tokenizer=tokenizer,
            vocab_size=VOCAB,
            field="data.train.0.source",
        )
        return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
