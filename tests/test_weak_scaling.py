"""scripts/bench/weak_scaling.py makes a config for each case."""

from scripts.bench import weak_scaling


def test_each_device_has_the_same_tokens_in_every_case():
    for case in weak_scaling.list_cases(weak_scaling.SERIES, weak_scaling.DEVICES):
        config = weak_scaling.make_config(case)
        mesh = config.mesh
        assert mesh.replica * mesh.data * mesh.seq == case.num_devices
        tokens = config.batch.rows_per_step * config.data.row_tokens
        assert tokens == case.num_devices * weak_scaling.TOKENS_PER_DEVICE
        documents = config.data.row_tokens / weak_scaling.document_tokens(case)
        assert config.data.max_segments_per_row == documents
