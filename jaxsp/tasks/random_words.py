"""Words of random letters."""

import string

import numpy as np


def draw_words(random: np.random.Generator, number: int, *, num_letters: int) -> list[str]:
    """Draws different words of lower-case letters.

    A larger number continues the same words, for the same state of the generator.
    """
    words: dict[str, None] = {}
    while len(words) < number:
        letters = random.integers(len(string.ascii_lowercase), size=num_letters)
        words["".join(string.ascii_lowercase[letter] for letter in letters)] = None
    return list(words)
