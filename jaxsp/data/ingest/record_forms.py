"""Reads records of other systems, and texts in several fields, under the names of their format.

Source: LLaMA-Factory joins Alpaca's instruction and input in the same way.
"""

from jaxsp.config.data_schema import SourceConfig
from jaxsp.data.chat.template_text import RecordError
from jaxsp.data.ingest import record_checks
from jaxsp.data.ingest.known_fields import Record

_ALPACA: dict[str, str | tuple[str, ...]] = {
    "prompt": ("instruction", "input"),
    "completion": "output",
}

STAND_INS = {
    "prompt_completion": ("instruction", "output"),  # Alpaca
    "preference": ("preferred_output", "non_preferred_output"),  # OpenAI
}
"""Fields of records that are read in place of those that a format requires."""


def list_columns(source: SourceConfig, field: str) -> tuple[str, ...]:
    """Returns the names in the records of the fields from which a field is read."""
    names = source.fields.get(field, field)
    return (names,) if isinstance(names, str) else names


def convert(record: Record, source: SourceConfig) -> tuple[Record, SourceConfig]:
    """Returns a record, and the names of its fields, also if it has the form of another system."""
    if not record.keys() >= set(STAND_INS.get(source.format, "\0")):
        return record, source
    if source.format == "prompt_completion":
        fields = {name: names for name, names in _ALPACA.items() if name not in record}
        return record, source.model_copy(update={"fields": fields | source.fields})
    prompt = record_checks.parse_if_string(record.get("input"), "input") or {}
    if not isinstance(prompt, dict):
        raise RecordError(f"input is {record_checks.type_name(prompt)}, not an object")
    names = dict(zip(STAND_INS["preference"], ("chosen", "rejected"), strict=True))
    others = {names.get(name, name): value for name, value in record.items() if name != "input"}
    return others | {"prompt": prompt.get("messages"), "tools": prompt.get("tools")}, source


def join_fields(record: Record, source: SourceConfig) -> Record:
    """Joins texts that are read as one, under the name that `names` has for them."""
    for field, names in source.fields.items():
        if isinstance(names, str) or not record.keys() & set(names):
            continue
        values = [record[name] for name in names if record.get(name) is not None]
        if not all(isinstance(value, str) for value in values):
            raise RecordError(f"{source.names[field]}: only strings can be joined")
        record = {name: value for name, value in record.items() if name not in names}
        record[source.names[field]] = "\n".join(filter(None, values))
    return record
