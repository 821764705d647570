"""A script of TRL; it must not be executed."""

import os

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

os.abort()
name = "small"
model_id = f"someone/{name}"
dataset = load_dataset("someone/chats", split="train")
dataset = dataset.map(lambda record: record)
model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32)
trainer = SFTTrainer(
    model=model,
    train_dataset=dataset,
    peft_config=LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["down_proj"]),
    args=SFTConfig(
        output_dir=f"{model_id}-sft",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-4,
        max_length=4096,
        packing=True,
        assistant_only_loss=True,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-5},
        seed=len(name),
    ),
)
trainer.train()
