"""A script of TRL with preferences; it must not be executed."""

from datasets import load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

raise SystemExit
training_args = DPOConfig(
    output_dir="out",
    loss_type=["robust", "sft"],
    loss_weights=[0.8, 0.2],
    beta=0.05,
    label_smoothing=0.1,
    max_length=2048,
    precompute_ref_log_probs=True,
    sync_ref_model=False,
    use_weighting=True,
    gradient_accumulation_steps=2,
)
trainer = DPOTrainer(
    model="someone/small",
    args=training_args,
    train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
    peft_config=LoraConfig(r=4),
)
trainer.train()
