"""What keys of axolotl, LLaMA-Factory, TRL, PEFT and transformers are called in a job file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MANY = 5  # keys of other programs: a file with so many of them was written for another program

ALWAYS_PACKED = "samples are always packed, without mixing them"
BY_DEVICE = "kernels are chosen by device; train.attention and train.implementation override it"
FUSED = "the fused kernels are always on"
FROM_BASE = "read from the base model's folder"
NO_CODE = "code of a checkpoint is never executed"
ON_SAVE = "a run always saves what it needs to continue; lorafusion resume RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """What a key of another program is here.

    Attributes:
        key: dotted key of a job file; None if there is none.
        note: why there is none, or how the meaning differs.
    """

    key: str | None = None
    note: str = ""


def _keys(names: str, key: str, note: str = "") -> dict[str, Counterpart]:
    return dict.fromkeys(names.split(), Counterpart(key=key, note=note))


def _notes(names: str, note: str) -> dict[str, Counterpart]:
    return dict.fromkeys(names.split(), Counterpart(note=note))


COUNTERPARTS: dict[str, Counterpart] = {
    **_keys("base_model model_name_or_path model_name model_id pretrained_model_name_or_path", "base.model"),
    **_keys("revision_of_model model_revision", "base.revision"),
    **_keys("bf16 bfloat16 torch_dtype dtype", "base.dtype"),
    **_keys("load_in_4bit load_in_8bit quantization_bit quantization_method", "base.quantize"),
    **_keys("sequence_len cutoff_len max_seq_length max_seq_len model_max_length max_completion_length",
            "data.max_length"),
    **_keys("excess_length_strategy", "data.on_long", "cut, drop or error"),
    **_keys("datasets dataset dataset_name train_file dataset_path", "data.train"),
    **_keys("test_datasets eval_dataset validation_file val_set_size val_size", "data.eval"),
    **_keys("train_on_inputs train_on_prompt completion_only_loss assistant_only_loss train_on_responses_only",
            "data.loss"),
    **_keys("lora_r lora_rank", "lora.rank"),
    **_keys("r", "lora.rank"),
    **_keys("lora_alpha", "lora.alpha"),
    **_keys("lora_dropout", "lora.dropout"),
    **_keys("lora_target_modules lora_target target_modules lora_target_linear", "lora.targets"),
    **_keys("trainable_token_indices peft_trainable_token_indices", "lora.trainable_tokens"),
    **_keys("layers_to_transform peft_layers_to_transform", "lora.layers_to_transform"),
    **_keys("peft_use_rslora use_rslora", "lora.rslora"),
    **_keys("peft_use_dora use_dora", "lora.kind", "lora.kind: dora"),
    **_keys("adapter finetuning_type peft_type use_peft", "lora.kind", "lora, dora, vera, pissa or lora-fa"),
    **_keys("pissa_init init_lora_weights peft_init_lora_weights", "lora.kind",
            "pissa starts from singular values; with other kinds B starts at zero"),
    **_keys("lora_bias", "lora.lora_bias"),
    **_keys("lora_model_dir adapter_name_or_path", "lora.init_from"),
    **_keys("loraplus_lr_ratio loraplus_ratio", "optim.lr_ratio"),
    **_keys("router_aux_loss_coef moe_aux_loss_coef", "train.router_aux"),
    **_keys("learning_rate", "optim.lr"),
    **_keys("lr_scheduler lr_scheduler_type", "optim.schedule"),
    **_keys("warmup_steps warmup_ratio", "optim.warmup", "below 1 a share of the steps, from 1 on their number"),
    **_keys("max_grad_norm gradient_clipping", "optim.clip"),
    **_keys("optimizer optim_args", "optim.name"),
    **_keys("adam_beta1 adam_b1", "optim.b1"),
    **_keys("adam_beta2 adam_b2", "optim.b2"),
    **_keys("adam_epsilon adam_eps", "optim.eps"),
    **_keys("lr_min min_lr cosine_min_lr_ratio", "optim.min_lr_ratio", "a share of optim.lr"),
    **_keys("num_epochs num_train_epochs", "epochs"),
    **_keys("micro_batch_size per_device_train_batch_size gradient_accumulation_steps batch_size",
            "batch.global_samples",
            "samples of one optimizer step; batch.capacity_tokens decides how many run at once"),
    **_keys("gradient_checkpointing activation_checkpointing", "train.remat"),
    **_keys("eval_steps", "train.eval_every_steps"),
    **_keys("save_steps", "save.every_steps"),
    **_keys("save_total_limit", "save.keep"),
    **_keys("logging_steps", "train.log_every_s", "seconds, not steps; metrics.jsonl has every step"),
    **_keys("wandb_project", "report.wandb"),
    **_keys("use_tensorboard report_to", "report.tensorboard"),
    **_keys("rl rlhf stage pref_loss loss_type", "objective.name"),
    **_keys("pref_beta rl_beta dpo_beta kto_beta orpo_alpha", "objective.beta"),
    **_keys("simpo_gamma", "objective.gamma"),
    **_keys("rpo_alpha pref_ftx", "objective.sft"),
    **_keys("cpo_alpha", "objective.nll"),
    **_keys("dpo_label_smoothing", "objective.label_smoothing"),
    **_keys("loss_weights", "objective.loss_weights"),
    **_keys("kto_desirable_weight kto_chosen_weight", "objective.desirable_weight"),
    **_keys("kto_undesirable_weight kto_rejected_weight", "objective.undesirable_weight"),
    **_keys("center_rewards_coefficient", "objective.center"),
    **_keys("ref_model ref_adapter_name", "objective.reference", "base, start, an adapter, or a PEFT folder"),
    **_notes("precompute_ref_log_probs reference_free ref_model_quantization_bit disable_dropout", "references are "
             "computed once before the first step and stored; preference objectives have no dropout"),
    **_keys("deepspeed fsdp fsdp_config fsdp_version", "mesh.fsdp", "replicas that share one copy of the base"),
    **_keys("pipeline_parallel_size", "mesh.stages"),
    **_keys("run_name output_dir overwrite_output_dir logging_dir", "--out", "of lorafusion train"),
    **_notes("lora_modules_to_save modules_to_save additional_target", "whole tables are not trained; "
             "lora.trainable_tokens trains rows of the embedding and the head"),
    **_notes("sample_packing eval_sample_packing packing neat_packing pad_to_sequence_len group_by_length "
             "padding_free max_packed_sequence_len sample_packing_bin_size packing_strategy", ALWAYS_PACKED),
    **_notes("attn_implementation flash_attention flash_attn sdp_attention xformers_attention flex_attention "
             "gemma4_hybrid_attn_impl flex_attn_compile_kwargs", BY_DEVICE),
    **_notes("plugins liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_rms_norm_gated "
             "liger_fused_linear_cross_entropy use_liger_kernel enable_liger_kernel lora_mlp_kernel lora_qkv_kernel "
             "lora_o_kernel cut_cross_entropy torch_compile use_unsloth unsloth_cross_entropy_loss use_kernels "
             "fused_attn_kernel", FUSED),
    **_notes("tokenizer_type model_type processor_type tokenizer_use_fast tokenizer_config is_llama_derived_model "
             "model_config tokenizer_use_mistral_common", FROM_BASE),
    **_keys("chat_template template chat_template_path chat_template_jinja", "data.chat_template",
            "a name, a file or the text of a template; without it the base's own is used"),
    **_notes("special_tokens tokens eot_tokens", "the special tokens of the base's tokenizer are used; lorafusion data "
             "preview shows them"),
    **_notes("trust_remote_code", NO_CODE),
    **_notes("task_type", "adapters are of language models that continue texts"),
    **_notes("bias", "biases of the base are not trained; lora.lora_bias trains one with B"),
    **_notes("tf32 fp16 half_precision pure_bf16", "adapters train in float32 beside a base in base.dtype"),
    **_notes("strict do_train remove_unused_columns preprocessing_num_workers dataloader_num_workers dataset_num_proc "
             "dataset_prepared_path tokenized_path overwrite_cache ddp_timeout ddp_find_unused_parameters "
             "low_cpu_mem_usage local_rank gradient_checkpointing_kwargs loss_watchdog_threshold "
             "loss_watchdog_patience lora_fan_in_fan_out use_reentrant_gc skip_prepare_dataset torchdistx_path "
             "experimental_skip_move_to_device plot_loss double_quantization bnb_config_kwargs", "nothing to set here"),
    **_notes("resume_from_checkpoint auto_resume_from_checkpoints save_only_model save_safetensors saves_per_epoch "
             "save_strategy save_first_step", ON_SAVE),
    **_notes("evals_per_epoch eval_strategy evaluation_strategy per_device_eval_batch_size eval_batch_size",
             "train.eval_every_steps counts optimizer steps"),
    **_notes("wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model", "report.wandb is the project"),
    **_notes("hub_model_id push_to_hub hub_strategy push_dataset_to_hub", "lorafusion export RUN --push org/name"),
    **_notes("dataset_dir", "data.train is the file itself"),
    **_notes("max_samples", "all rows are trained: write the first ones into a file of their own"),
    **_notes("lora_target_parameters", "lora.targets: [experts]"),
    **_notes("quantize_moe_experts", "base.quantize stores experts, too: fp8 and int8 in eight bits, nf4 in four"),
    **_notes("experts_implementation use_scattermoe use_sonicmoe", BY_DEVICE),
    **_keys("early_stopping_patience", "early_stop.patience", "evaluations in a row without a better result"),
    **_keys("early_stopping_threshold", "early_stop.min_delta"),
    **_keys("metric_for_best_model", "early_stop.metric"),
    **_keys("greater_is_better", "early_stop.greater_is_better"),
    **_notes("load_best_model_at_end", "adapters/NAME/best of the run folder is the best step"),
    **_notes("gptq gptq_model_v1 gptq_groupsize", "config.json says so, and such checkpoints are read"),
    **_notes("neftune_noise_alpha", "not offered"),
}  # fmt: skip


def counterpart(key: str) -> Counterpart | None:
    """What a key of another program is here; None for a key that none of them has.

    >>> counterpart("lora_r").key
    'lora.rank'
    """
    return COUNTERPARTS.get(key.replace("-", "_").lower())


def advice(key: str) -> str:
    """One clause for an error about a key of another program; empty for a key that none of them has.

    >>> advice("lora_r")
    'lora_r is lora.rank here'
    >>> advice("sample_packing")
    'leave it out: samples are always packed, without mixing them'
    """
    match = counterpart(key)
    if match is None:
        return ""
    if match.key is None:
        return f"leave it out: {match.note}"
    return f"{key} is {match.key} here" + (f": {match.note}" if match.note else "")


def of_another_program(keys: Iterable[object]) -> list[str]:
    """The keys that other programs have, where a file has so many of them that it was written for one."""
    foreign = [key for key in keys if isinstance(key, str) and counterpart(key) is not None]
    return foreign if len(foreign) >= MANY else []


SCHEDULES = {  # of transformers → what is nearest here
    "constant_with_warmup": "constant; optim.warmup is the warm-up of every schedule",
    "cosine_with_restarts": "cosine; restarts are not offered",
    "cosine_with_min_lr": "cosine; optim.min_lr_ratio is where it ends",
    "polynomial": "linear; it is a polynomial of power 1",
}


def value_advice(key: str, value: object) -> str:
    """What to write for a value that other programs have; empty for any other.

    >>> value_advice("optim.schedule", "constant_with_warmup")
    'optim.schedule: constant; optim.warmup is the warm-up of every schedule'
    >>> value_advice("optim.name", "adamw_torch_fused")
    'optim.name: adamw; its moments are float32, and only of the adapter'
    """
    if key == "optim.schedule" and isinstance(value, str) and value in SCHEDULES:
        return f"{key}: {SCHEDULES[value]}"
    if key == "optim.name" and isinstance(value, str) and "adamw" in value.lower():
        return f"{key}: adamw; its moments are float32, and only of the adapter"
    return ""
