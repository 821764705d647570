"""Samples of every task: solvable, as long as wanted, and the same everywhere."""

import re
import zlib

import numpy as np
import pytest

from jaxsp.core.errors import UserError
from jaxsp.tasks import haystack, tasks
from tests.tasks import solutions, tokenizers

KINDS = ("bytes", "byte_level", "sentencepiece")
LENGTHS = (512, 5000)
TASKS = tasks.TASK.by_name()


def make(task, kind="bytes", *, length=512, depths=3, number=4, seed=0, **options):
    tokenize, _ = tokenizers.get(kind)
    fields = {"depths": depths} if task == "needle" else {}
    chosen = TASKS[task](lengths=(length,), samples=number, seed=seed, **fields)
    return chosen.make_samples(tokenize, length=length, **options)


def texts(sample, kind="bytes"):
    """Prompt and answer as text."""
    _, decode = tokenizers.get(kind)
    prompt = decode(sample.prompt_ids)
    whole = decode(np.concatenate([sample.prompt_ids, sample.answer_ids]))
    return prompt, whole.removeprefix(prompt)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_samples_are_solvable_as_long_as_wanted_and_tokenized_as_a_whole(task, kind, length):
    tokenize, _ = tokenizers.get(kind)
    for sample in make(task, kind, length=length, reserved_tokens=2):
        prompt, answer = texts(sample, kind)
        assert prompt[-1].isalpha(), "no space before the answer, which begins with one"
        assert answer == solutions.solve(task, prompt)
        num_tokens = 2 + len(sample.prompt_ids) + len(sample.answer_ids)
        assert 0.94 * length < num_tokens <= sample.length == length
        assert tokenize(prompt) == sample.prompt_ids.tolist()
        assert tokenize(prompt + answer) == [*sample.prompt_ids, *sample.answer_ids]


def test_a_token_across_the_boundary_belongs_to_the_answer():
    def tokenize(text):
        # the last letter before a number is merged with the space and the first digit
        return [ord(part[0]) + 256 * len(part) for part in re.findall(r"\w \d|.", text, re.DOTALL)]

    task = TASKS["multi_key"](lengths=(2000,), samples=1)
    (sample,) = task.make_samples(tokenize, length=2000)
    assert sample.answer_ids[0] == ord("s") + 256 * 3  # of "is"
    assert len(sample.answer_ids) == 7
    assert sample.prompt_ids[-1] == ord("i") + 256


@pytest.mark.parametrize("length", LENGTHS)
def test_the_needle_is_at_its_depth_between_two_sentences(length):
    made = make("needle", length=length, depths=5, number=3)
    assert [sample.depth for sample in made] == np.repeat([0, 0.25, 0.5, 0.75, 1], 3).tolist()
    for sample in made:
        prompt, _ = texts(sample)
        lines = prompt.split("\n")[1:-2]
        (place,) = (index for index, line in enumerate(lines) if line.startswith("The access code"))
        assert all(line.endswith(".") for line in lines)
        sizes = [len(line) + 1 for line in lines if not line.startswith("The access code")]
        wanted = sample.depth * sum(sizes)
        assert abs(sum(sizes[:place]) - wanted) <= max(sizes) / 2


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("multi")])
def test_needles_are_spread_over_the_haystack(task):
    depths = []
    for sample in make(task, length=20000, number=30):
        assert sample.depth is None
        prompt, _ = texts(sample)
        text = prompt.partition("\nQuestion")[0]
        depths += [match.start() / len(text) for match in re.finditer("access code of", text)]
    assert len(depths) == 4 * 30
    counts, _ = np.histogram(depths, bins=4, range=(0, 1))
    assert counts.min() > 15, counts


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_the_seed_and_not_on_the_number_of_them(task):
    def ids(**options):
        return [(*sample.prompt_ids, *sample.answer_ids) for sample in make(task, **options)]

    assert ids() == ids()
    assert ids(number=2)[:2] == ids()[:2]
    assert len({*ids(), *ids(seed=1)}) == 2 * len(ids())


@pytest.mark.parametrize("task", TASKS)
def test_all_lengths_have_the_same_questions(task):
    for short, long in zip(make(task), make(task, length=3000), strict=True):
        for first, second in zip(texts(short), texts(long), strict=True):
            assert first.rpartition("\nQ")[2] == second.rpartition("\nQ")[2]


def test_samples_are_the_same_on_every_machine():
    for task, (answer, checksum) in RECORDED.items():
        sample = make(task)[1]
        assert texts(sample)[1] == answer
        assert zlib.crc32(sample.prompt_ids.astype("<i4").tobytes()) == checksum


RECORDED = {
    "needle": (" 2792914", 1189038448),
    "multi_key": (" 8358874", 3862851422),
    "multi_value": (" 4950384, 3197499, 4655793, 9159764", 1523001270),
    "multi_query": (" 2547967, 4438798, 1130651, 3953488", 1788447035),
    "variable_tracking": (" KRGCU, PZNJP, TFVVS, YDJUM, LAHXV", 314582169),
    "frequent_words": (" csxdvc, euwcww, ugbwvt", 1450395521),
}
"""Answers, and checksums of prompts of 512 bytes. A change of words or templates changes them, and
with them the results of every model."""


def test_no_sentence_has_a_key_or_a_code_and_none_is_twice():
    sentences = haystack.make_sentences()
    assert len(set(sentences)) == len(sentences) == 8192
    for sentence in sentences:
        assert re.fullmatch(r"[A-Z][a-z, ]+\.\n", sentence)
        assert "access code" not in sentence


@pytest.mark.parametrize("task", TASKS)
def test_the_smallest_length_that_works_is_suggested(task):
    with pytest.raises(
        UserError, match=rf"^eval.tasks.0.lengths = 64: .*{task}.* or more"
    ) as error:
        make(task, length=64, reserved_tokens=1, field="eval.tasks.0.lengths")
    smallest = int(re.findall(r"Use (\d+) or more", str(error.value))[0])
    assert smallest <= 512
    assert make(task, length=smallest, reserved_tokens=1)
    with pytest.raises(UserError, match=f"at least {smallest},"):
        make(task, length=smallest - 1, reserved_tokens=1)


def test_counts_of_the_words_that_matter_always_differ():
    for num_dots in range(tasks._MIN_DOTS, 10_000):
        counts = tasks._count(num_dots, 5)
        assert (np.diff(counts) < 0).all(), num_dots
    assert (np.diff(tasks._count(tasks._MIN_DOTS - 1, 5)) == 0).any()
