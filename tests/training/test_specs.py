"""A step is varied by its config: attention follows where it depends on what changed."""

from jaxsp.attention.strategy import combine
from jaxsp.training.specs import make_spec
from tests import batches


def test_a_step_with_other_values_is_the_step_of_that_config():
    config = batches.make_config().step
    devices = list(batches.mesh(1, 1, 4).devices.flat)
    spec = make_spec(config.change(mesh={"seq": 2}), batches.model(), devices=devices)
    changed = spec.respec(mesh={"seq": 4}, row_tokens=512)
    assert changed == make_spec(changed.config, batches.model(), devices=devices)
    assert changed.mesh.shape["seq"] == 4
    assert changed.attention.strategy == combine(4)
    remat = spec.respec(memory={"remat": "full"}, rows_per_step=16)
    assert (remat.attention, remat.mesh) == (spec.attention, spec.mesh)
    assert remat.config == spec.config.change(memory={"remat": "full"}, rows_per_step=16)
