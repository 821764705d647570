# two GPUs share a row
MODEL=Qwen/Qwen3-8B
CUDA_VISIBLE_DEVICES=0,1,2,3 \
swift sft --model $MODEL --tuner_type full --use_hf true \
    --dataset 'someone/chats:en#500' data/own.jsonl \
    --max_length 32768 --packing true --sequence_parallel_size 2 \
    --learning_rate 1e-5 --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' \
    --rope_scaling yarn --max_model_len 131072 \
    --save_steps 200 --deepspeed zero3_offload --lora_rank 8 --output_dir out
swift export --adapters out
