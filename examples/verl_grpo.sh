#!/usr/bin/env bash
# verl's GRPO on two CPU ranks, each beside a vLLM server, on what verl_grpo.py wrote into this folder. Arguments are
# verl's own, key=value; the rewards of each step go to metrics.jsonl. docs/verl.md explains the settings. VERL_MAIN
# names another trainer of verl than its default.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export VERL_PLATFORM=cpu GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$PWD/metrics.jsonl}
unset CUDA_VISIBLE_DEVICES # Ray would hold the made-up devices below against it
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
# Two cores start about twenty processes: longer than Ray and vLLM wait by default.
export RAY_raylet_start_wait_time_s=300 RAY_worker_register_timeout_seconds=900 VLLM_ENGINE_READY_TIMEOUT_S=1800
export RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0 RAY_health_check_timeout_ms=60000

actor=actor_rollout_ref.actor rollout=actor_rollout_ref.rollout
model=(
    actor_rollout_ref.model.path="$PWD/model"
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa # FlashAttention needs a GPU
    actor_rollout_ref.model.enable_gradient_checkpointing=false
)
data=(
    data.train_files="$PWD/prompts.parquet" data.val_files="$PWD/prompts.parquet"
    data.train_batch_size=8 data.max_prompt_length=48 data.max_response_length=64 data.dataloader_num_workers=0
    reward.custom_reward_function.path="$here/verl_grpo.py" reward.num_workers=1
)
training=(
    algorithm.adv_estimator=grpo
    $actor.strategy=odc $actor.ppo_mini_batch_size=8 $actor.optim.lr=2e-3 $actor.use_kl_loss=false
    $actor.use_dynamic_bsz=true $actor.ppo_max_token_len_per_gpu=256
    $actor.use_torch_compile=false $actor.fsdp_config.use_torch_compile=false
    +$actor.fsdp_config.mixed_precision.param_dtype=fp32
)
rollouts=(
    $rollout.name=vllm $rollout.n=4 $rollout.tensor_model_parallel_size=1 $rollout.dtype=float32
    $rollout.enforce_eager=true
    $rollout.free_cache_engine=false +$rollout.enable_sleep_mode=false # vLLM on a CPU cannot sleep
    $rollout.max_model_len=112 $rollout.max_num_seqs=32 $rollout.max_num_batched_tokens=2048
    +$rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864
    $rollout.checkpoint_engine.update_weights_bucket_megabytes=4 $rollout.agent.num_workers=1
)
cluster=(
    trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=2
    +ray_kwargs.ray_init.num_gpus=2 # what verl asks Ray for: one for each rank, no device stands behind it
    +ray_kwargs.ray_init._node_ip_address=127.0.0.1 # all processes are here
    ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.include_dashboard=false
    +ray_kwargs.ray_init.object_store_memory=134217728
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
)
logging=(
    trainer.total_training_steps=20 trainer.total_epochs=1000 trainer.val_before_train=false trainer.test_freq=-1
    trainer.save_freq=-1 trainer.resume_mode=disable 'trainer.logger=[console,file]'
    trainer.default_local_dir="$PWD/checkpoints"
)
exec python -m "${VERL_MAIN:-verl.trainer.main_ppo}" "${model[@]}" "${data[@]}" "${training[@]}" "${rollouts[@]}" \
    "${cluster[@]}" "${logging[@]}" "$@"
