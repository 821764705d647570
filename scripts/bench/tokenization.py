"""Times how records become tokens on disk, compared with the tokenizer without jaxsp.

    python -m scripts.bench.tokenization --out scripts/bench/results/today-tokenization.json

The text is Python's standard library, each file a document, first as text and then as chats of
four questions and answers. A byte-level BPE tokenizer with 16,384 tokens is trained on it. Both
programs run in one process with one thread, in alternation; seconds are CPU time, and the
ratio is the median over the runs. `jaxsp` is all of tokenize.tokenize_dataset: rendering,
tokenizing, checking, counting, and writing the cache.
"""

import json
import os
import pathlib
import statistics
import sys
import sysconfig
import tempfile
import time
from typing import Any

import datasets
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxsp.config import data_schema
from jaxsp.data.ingest import sources
from jaxsp.data.tokenization import tokenize
from scripts.bench import machine, results

MODULE = "scripts.bench.tokenization"

VOCAB_SIZE = 16_384

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=6, help="of text")
    args = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = read_texts(args.megabytes * 1e6)
    tokenizer = train_tokenizer(texts)
    chats = [make_chat(text) for text in texts]
    rendered = [tokenizer.apply_chat_template(chat["messages"], tokenize=False) for chat in chats]
    contents = results.open_results(
        MODULE,
        arguments,
        **machine.read_cpu_versions("transformers", "tokenizers", "datasets"),
    )
    for record_format, rendered_texts, records in (
        ("text", texts, [{"text": text} for text in texts]),
        ("messages", rendered, chats),
    ):
        times = compare(rendered_texts, records, tokenizer, record_format, args.runs)
        case = {"format": record_format, **times}
        contents["cases"].append(case)
        print("  ".join(f"{name} {value}" for name, value in case.items()), flush=True)
        results.write(args.out, contents)
    return 0


def compare(
    texts: list[str],
    records: list[dict[str, Any]],
    tokenizer: Any,
    record_format: str,
    num_runs: int,
) -> dict[str, Any]:
    """Times the tokenizer on rendered texts, and tokenize.tokenize_dataset on their records."""
    tokenizer_s = []
    jaxsp_s = []
    for _ in range(num_runs):
        began = time.process_time()
        encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        num_tokens = sum(map(len, encodings))
        tokenizer_s.append(time.process_time() - began)
        jaxsp_s.append(time_jaxsp(records, tokenizer, record_format))
    ratios = [ours / theirs for ours, theirs in zip(tokenizer_s, jaxsp_s, strict=True)]
    return {
        "documents": len(texts),
        "megabytes": round(sum(len(text.encode()) for text in texts) / 1e6, 2),
        "tokens": num_tokens,
        "encode_batch_tokens_per_s": round(num_tokens / statistics.median(tokenizer_s)),
        "jaxsp_tokens_per_s": round(num_tokens / statistics.median(jaxsp_s)),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def read_texts(num_bytes: float) -> list[str]:
    """Files of Python's standard library, at least this size together."""
    texts: list[str] = []
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if num_bytes <= 0:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        if text and "site-packages" not in path.parts:
            num_bytes -= len(text)
            texts.append(text)
    return texts


def make_chat(text: str) -> dict[str, Any]:
    """A document as four questions and answers."""
    quarter = -(-len(text) // 4)
    messages = []
    for start in range(0, 4 * quarter, quarter):
        content = text[start : start + quarter].strip() or "pass"
        messages += [{"role": role, "content": content} for role in ("user", "assistant")]
    return {"messages": messages}


def train_tokenizer(texts: list[str]) -> Any:
    """Trains a byte-level BPE tokenizer with a chat template."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=CHATML
    )


def time_jaxsp(records: list[dict[str, Any]], tokenizer: Any, record_format: str) -> float:
    """CPU time of tokenize.tokenize_dataset on records in memory, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = pathlib.Path(folder) / "cache"
        path = pathlib.Path(folder) / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        source = {"source": str(path), "format": record_format}
        config = data_schema.DataConfig.model_validate(
            {"train": [source], "row_tokens": 1024, "num_workers": 1}
        )
        (source_config,) = config.train
        field = "data.train.0.source"
        dataset = sources.read(source_config, data=config, field=field)
        began = time.process_time()
        tokenize.tokenize_dataset(
            dataset,
            source=source_config,
            data=config,
            tokenizer=tokenizer,
            vocab_size=VOCAB_SIZE,
            field=field,
        )
        return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
