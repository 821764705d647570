"""The page about other systems is up to date."""

import pytest

from scripts import coming_from, generated_text
from tests import markdown, test_language

MAX_LINES = 150


@pytest.mark.parametrize("name", ["options", "not needed", "not offered"])
def test_the_page_is_up_to_date(name):
    text = generated_text.read_part(coming_from.FILE, name)
    assert text == coming_from.render_parts()[name], "run python -m scripts.coming_from"


def test_the_page_is_short_and_follows_the_rules():
    text = coming_from.FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert list(test_language.bad_text(text)) == []
    assert list(markdown.broken_links(coming_from.FILE)) == []


def test_every_listed_name_has_its_system_s_own_row():
    fields = coming_from.render_parts()["options"]
    for part in (
        "`mesh.seq` | `cp_size` | `context_parallel_size` |  |",
        "`ici_context_parallelism`",
    ):
        assert part in fields
    with pytest.raises(ValueError, match="no_such_option"):
        coming_from.find_counterpart("no_such_option")
