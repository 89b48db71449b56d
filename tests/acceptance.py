"""What users were promised, by id: the promise, and the tests of it (FILE::FUNCTION below `tests/`)."""

CHECKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "A1": (
        "models for explicit meshes are served as they are written",
        (
            "modules/test_sharded_calls.py::test_a_model_for_an_explicit_mesh_trains_as_on_one_device"
            "_and_moves_no_more_than_without_lora",
            "modules/test_sharded_calls.py::test_a_merged_model_on_a_mesh_computes_what_its_adapter_computes",
            "modules/test_sharded_calls.py::test_a_layer_gives_the_sharding_that_its_call_asks_for",
            "modules/test_published_models.py::test_two_adapters_train_in_an_nnx_model_and_merge_into_it",
            "modules/test_flax_examples.py::test_prints_what_it_says",
        ),
    ),
    "A2": (
        "Linen under nn.scan and nn.vmap, and experts by modules=",
        (
            "modules/test_linen_stacked.py::test_a_mixed_batch_computes_what_merged_parameters_compute",
            "modules/test_linen_stacked.py::test_experts_take_lora_if_a_target_names_them",
            "modules/test_published_models.py::test_two_adapters_train_in_a_linen_model_and_merge_into_it",
        ),
    ),
    "A3": (
        "nothing silent: classes and reasons, heads by shape, keys of PEFT",
        (
            "modules/test_what_users_read.py::test_no_text_denies_layers_or_proposes_the_same_word",
            "modules/test_what_users_read.py::test_a_linen_module_inside_an_nnx_model_is_named",
            "modules/test_what_users_read.py::test_heads_are_found_by_the_width_of_the_vocabulary_or_named",
            "modules/test_what_users_read.py::test_peft_keys_are_never_renamed_but_for_a_decoder_s_own_layers",
            "modules/test_linen_stacked.py::test_the_head_is_the_layer_as_wide_as_the_vocabulary",
        ),
    ),
    "A4": (
        "Linen saves, loads and optimises like NNX; symbolic batches; a complete API page",
        (
            "modules/test_linen_stacked.py::test_adapters_are_saved_and_loaded_in_every_format",
            "modules/test_linen_stacked.py::test_each_adapter_has_its_own_optimizer_and_its_own_dropout_in_each_layer",
            "optim/test_per_adapter.py::test_stacked_layers_use_another_axis",
            "modules/test_what_users_read.py::test_a_model_is_exported_with_a_symbolic_batch",
            "test_docs.py::test_the_api_page_has_every_public_name",
        ),
    ),
    "B1": (
        "verify judges gradients: no false alarm, planted leaks are found",
        (
            "reliability/test_compare_alone.py::test_no_false_alarm",
            "reliability/test_compare_alone.py::test_planted_faults_are_found",
        ),
    ),
    "C1": (
        "a report of one file, small and readable from a phone to a wide screen",
        (
            "cli/test_report_command.py::test_page_of_a_finished_run",
            "cli/test_report_command.py::test_a_sweep_of_sixteen_stays_small_and_tells_its_adapters_apart",
            "cli/test_report_command.py::test_pages_with_charts_fit_their_window_and_answer_a_touch",
            "cli/test_report_command.py::test_watch_ends_with_the_run",
        ),
    ),
    "C2": (
        "adapters are ranked by held-out loss, and the best one is named",
        (
            "api/test_status_screens.py::test_a_sweep_ends_with_an_answer",
            "api/test_status_screens.py::test_adapters_are_compared_by_the_metric_that_their_job_names",
            "api/test_status_screens.py::test_without_common_data_nothing_is_ranked",
        ),
    ),
    "C3": (
        "a run exists from its first second",
        (
            "api/test_status_screens.py::test_a_run_exists_from_its_first_second",
            "api/test_status_screens.py::test_phases_end_when_the_run_has_started",
            "api/test_status_screens.py::test_a_run_stays_and_a_killed_start_is_told",
        ),
    ),
    "D1": (
        "lists, globs, weights, packed files, shares held out, rows of tokens",
        (
            "data/test_several_sources.py::test_a_list_is_the_joined_file_bit_for_bit",
            "data/test_several_sources.py::test_the_order_is_fixed_by_seed_and_continues_where_it_was",
            "data/test_several_sources.py::test_rows_of_tokens_are_taken_as_they_are",
            "data/test_hold_out.py::test_every_sample_is_in_one_part_and_no_content_in_both",
            "data/test_large_sets.py::test_memory_holds_a_block_however_long_a_set_is",
        ),
    ),
    "D2": (
        "best steps, early stops and halving leave the others as they are",
        (
            "training/test_sweep_ends.py::test_bad_members_end_and_their_slots_are_spared",
            "training/test_sweep_ends.py::test_the_others_train_as_if_nothing_had_ended",
            "training/test_sweep_ends.py::test_best_links_to_the_step_with_the_lowest_held_out_loss",
            "training/test_sweep_ends.py::test_screens_say_who_ended_early_and_what_it_spared",
        ),
    ),
    "D3": (
        "generation equals transformers with PEFT; samples at evaluations; caches of a conversation",
        (
            "generation/test_greedy.py::test_tokens_are_those_of_transformers_and_peft",
            "training/test_text_samples.py::test_texts_are_in_the_run_and_change_as_the_adapter_learns",
            "generation/test_generator.py::test_a_second_turn_reads_only_new_tokens",
        ),
    ),
    "E1": (
        "words of other trainers are converted or answered",
        (
            "config/test_convert.py::test_an_axolotl_file_becomes_a_job_file_that_loads",
            "config/test_convert.py::test_every_key_is_carried_over_or_has_a_note",
            "config/test_convert.py::test_a_file_of_another_program_gets_one_error",
            "config/test_convert.py::test_a_foreign_key_is_answered_with_its_name_here",
        ),
    ),
    "E2": (
        "trackers hold a folder or a run per adapter",
        (
            "report/test_trackers.py::test_tensorboard_has_a_folder_per_adapter_with_the_same_tags",
            "report/test_trackers.py::test_wandb_has_a_run_per_adapter_in_a_group",
            "report/test_trackers.py::test_mlflow_has_a_run_per_adapter_in_an_experiment",
            "report/test_trackers.py::test_trackio_has_a_run_per_adapter_in_a_group",
        ),
    ),
    "E3": (
        "exports carry a card with results, no folder of this machine, and commands for other programs",
        (
            "cli/test_handover.py::test_all_adapters_are_exported_at_once_in_another_dtype",
            "cli/test_handover.py::test_an_export_names_no_folder_of_its_run_and_its_card_is_one_for_the_hub",
            "cli/test_handover.py::test_other_programs_are_named_where_they_keep_the_meaning_of_an_adapter",
            "cli/test_handover.py::test_a_push_needs_the_hub_and_says_what_was_not_uploaded",
        ),
    ),
    "E4": (
        "the first pages are true, examples come with the program, missing folders are named",
        (
            "test_docs.py::test_links_are_valid",
            "test_docs.py::test_python_runs",
            "newcomer/test_first_steps.py::test_every_command_of_the_page_runs_from_an_installed_wheel",
            "cli/test_simulate_command.py::test_an_example_is_made_and_can_be_simulated_again",
            "cli/test_plan_gpus.py::test_every_mesh_of_all_devices_is_there_and_the_fastest_that_fits_is_first",
            "checkpoint/test_base_model.py::test_a_hub_that_does_not_answer_is_the_second_thing_said",
            "cli/test_commands.py::test_resume_on_another_mesh",
        ),
    ),
}
