"""Data sets of token ids that are made here, such as the prompts of an evaluation."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from jaxsp.config.schema import Config
from jaxsp.core.errors import at
from jaxsp.data.ingest import columnar
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
            "tokens": columnar.make_lists([array.astype(np.int32) for array in documents]),
            "labels": columnar.make_lists([array.astype(np.int32) for array in labels]),
            "place": pa.array([f"{name}[{number}]" for number in range(len(documents))]),
        }
    )
    with at(name):
        rows = Documents([datasets.Dataset(table)], source_names=[name])
    assert len(rows.lengths) == len(documents), "a document has no label"
    assert rows.lengths.max() <= config.data.row_tokens, "a document is longer than a row"
    return dataset.pack_documents(name, rows, config, digests=[""])
