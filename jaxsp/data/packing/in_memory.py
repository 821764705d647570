"""Data sets of token ids that are made here, such as the prompts of an evaluation."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from jaxsp.config.schema import Config
from jaxsp.data.packing import dataset
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.row_reader import Documents


def pack_arrays(
    name: str,
    documents: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    config: Config,
) -> PackedDataset:
    """Packs documents into rows, which must hold each of them.

    Args:
        documents: token ids, int32 [T].
        labels: label of each token, not shifted: a token without a loss has -100. Every document
            must have a label after its first token.
    """
    import datasets

    table = pa.table(
        {
            "tokens": _make_column(documents),
            "labels": _make_column(labels),
            "place": pa.array([f"{name}[{number}]" for number in range(len(documents))]),
        }
    )
    rows = Documents([datasets.Dataset(table)], source_names=[name], field=name)
    assert len(rows.lengths) == len(documents), "a document has no label"
    assert rows.lengths.max() <= config.data.row_tokens, "a document is longer than a row"
    return dataset.pack_documents(name, rows, config, digests=[""])


def _make_column(arrays: Sequence[np.ndarray]) -> pa.LargeListArray:
    ends = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(ends, np.concatenate(arrays).astype(np.int32))
