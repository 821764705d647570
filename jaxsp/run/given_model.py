"""The model that a command is given by name: a run, a checkpoint, or a Hugging Face model."""

import dataclasses
import pathlib
from typing import Any

import jax

from jaxsp.blocks import layers
from jaxsp.checkpoint import checksums, reader, run_paths, run_storage
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.hf import folder
from jaxsp.hf.folder import HubError
from jaxsp.run import build, config_file, model_files, resume
from jaxsp.run.build import PreparedModel
from jaxsp.run.config_file import Config
from jaxsp.training import train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenModel:
    """A checkpoint, or the source of a model; see `find`."""

    name: str
    checkpoint: pathlib.Path | None
    """None for a Hugging Face model."""
    meta: CheckpointMeta | None

    @property
    def step(self) -> int:
        """Number of training steps of the weights; 0 for a Hugging Face model."""
        return 0 if self.meta is None else self.meta.step

    @property
    def model_fields(self) -> dict[str, Any]:
        """Fields of the config's model that name the model."""
        names = {"source": self.name, "config": None}
        if self.meta is None:
            return names
        return {name: self.meta.config["model"][name] for name in names}

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the run's config; none for a Hugging Face model. Other devices may not have the
        run's kernel of delta nets."""
        if self.meta is None:
            return {}
        config = self.meta.config
        return config | {"model": config["model"] | {"delta_net_kernel": "auto"}}

    def add_model(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of a config with this model, and the adapter of its run."""
        adapter = {} if self.meta is None else {"adapter": self.meta.config["adapter"]}
        return fields | adapter | {"model": fields.get("model", {}) | self.model_fields}

    def check_config(self, config: Config) -> None:
        """Checks that a config still has this model. Raises: UserError."""
        for name, value in self.model_fields.items():
            if getattr(config.model, name) != value:
                raise UserError(
                    f"model.{name}: must be the model of {self.name}. For another model, use its "
                    f"name instead of {self.name}."
                )
        if self.meta is None:
            return
        saved = config_file.parse(self.meta.config)
        trained = saved.objective.type
        if "reward" in (trained, config.objective.type) and trained != config.objective.type:
            raise UserError(
                f"objective.type = {config.objective.type}: {self.name} was trained with "
                f"{trained}, and a reward model has another head. Use objective.type={trained}."
            )
        if config.adapter != saved.adapter:
            raise UserError(
                f"adapter: must be that of {self.name}. To use another one, export it, and use the "
                "name of its base with adapter.type=lora adapter.source=FOLDER."
            )

    def find_model_dir(self, config: Config) -> pathlib.Path | None:
        """Folder with the run's copy of the model's small files; None without one, and if the
        config has another tokenizer."""
        is_same = self.fields and config.model.tokenizer == self.fields["model"]["tokenizer"]
        return resume.find_model_dir(self.checkpoint) if self.checkpoint and is_same else None

    def resolve(self, config: Config) -> PreparedModel:
        """Resolves the config without an optimizer or offloaded activations."""
        on_device: dict[str, Any] = {"offload_activations": "none", "offload_optimizer": "none"}
        on_device |= {"offload_every": 1, "offload_during_attention": "auto"}
        config = config.with_fields(memory=on_device)
        if self.checkpoint is not None:  # it contains the adapters, whose source may be gone
            config = config.with_fields(adapter={"source": None})
        return build.prepare_model(
            config,
            devices=jax.devices(),
            problems=ProblemCollector(),
            for_training=False,
            hf_config=None if self.meta is None else self.meta.model,
            model_dir=self.find_model_dir(config),
        )

    def describe(self, resolved: PreparedModel) -> str:
        """Example: `runs/a, step 40; bfloat16 compute on replica 1 x data 2 x seq 4`."""
        name = self.name if self.meta is None else f"{self.name}, step {self.meta.step}"
        mesh = " x ".join(f"{axis} {size}" for axis, size in resolved.spec.mesh.shape.items())
        return f"{name}; {resolved.config.model.compute_dtype} compute on {mesh}"

    def load_weights(self, resolved: PreparedModel) -> layers.Weights:
        """Loads the weights onto the mesh. Raises: UserError for missing or damaged files."""
        spec = resolved.spec
        if self.checkpoint is None:
            assert resolved.model_folder is not None, "the name is a model's source"
            folders = (resolved.model_folder, resolved.adapter_folder)
            return model_files.open_weights(spec, *folders).make()
        assert self.meta is not None, "every checkpoint has metadata"
        dtype = self.meta.config["model"]["compute_dtype"]
        trained = dataclasses.replace(spec, config=spec.config.change(compute_dtype=dtype))
        opened = model_files.open_weights(trained, resolved.model_folder, None)
        frozen = opened.make(frozen_only=True)
        table = train_state.select_frozen(trained.state_table, trained.state_table)
        reader.check_base(self.checkpoint, checksums.compute_frozen(table, frozen))
        if trained.dtype != spec.dtype:  # the base was checked as training rounded it
            del frozen  # a device may not hold both
            frozen = dataclasses.replace(opened, spec=spec).make(frozen_only=True)
        like = train_state.abstract_weights(spec)
        return reader.restore_weights(self.checkpoint, like, table=spec.state_table, frozen=frozen)


def find(name: str) -> GivenModel:
    """Finds a run's latest checkpoint, a checkpoint, or a Hugging Face model. Raises: UserError"""
    with at("WHAT", name):
        local = run_storage.make_local(name)
    checkpoint = run_paths.find_latest(local)
    if checkpoint is not None:
        return GivenModel(name=name, checkpoint=checkpoint, meta=reader.read_meta(checkpoint))
    if (pathlib.Path(local) / run_paths.CONFIG_FILE).is_file():
        raise UserError(
            f"{name}: holds no checkpoint yet. A run writes one when it ends and when "
            "run.save_every requests it."
        )
    path = pathlib.Path(name)
    try:
        folder.find(name, field="WHAT")  # before missing fields are reported
    except UserError as error:
        if (path / "config.json").is_file():
            raise
        reason = str(error).removeprefix(f"WHAT = {name}: ")
        if isinstance(error, HubError) and not path.exists():
            reason = f"there is no folder {path.absolute()}, and for a model {error.reason}."
        raise UserError(
            f"{name}: must be a run's directory, a checkpoint, a folder with a model's "
            f"config.json, or the name of a model on the hub; {reason}"
        ) from None
    return GivenModel(name=name, checkpoint=None, meta=None)
