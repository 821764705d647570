"""All formats of records."""

from jaxsp.config.fields import Choice
from jaxsp.data.formats.chats import Messages, PromptCompletion
from jaxsp.data.formats.pairs import Preference, Unpaired
from jaxsp.data.formats.plain import Text, Tokens

FORMATS = (Text, Messages, PromptCompletion, Preference, Unpaired, Tokens)

FORMAT = Choice(selector="format", types=FORMATS)
