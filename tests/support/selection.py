"""Which tests a plain ``pytest`` leaves out, and under which marker: what takes long and has a telling
sample.

``MARKS`` gives a file, a test function or a single case a marker of pyproject.toml. ``SAMPLES`` are the
functions and cases of those files that stay in the default run. A folder's tests are named relative to
``tests``.
"""

import re

MARKS = {
    "sweep": """
        bridge/test_bridged_cache.py::test_a_step_that_is_not_committed_leaves_no_trace
        bridge/test_bridged_cache.py::test_bytes_are_known_before_and_the_same_after
        bridge/test_bridged_cache.py::test_pages_of_windows_move
        bridge/test_disk_cache.py::test_a_turn_reads_only_what_is_new
        bridge/test_few_rows.py::test_the_logits_are_mlx_lms
        bridge/test_folder.py
        bridge/test_hook.py::test_attention_is_mlx_lms
        bridge/test_hook.py::test_the_kernel_serves_architectures
        bridge/test_mounted.py::test_batches_give_each_sequence_what_it_gets_alone
        bridge/test_pool_bridged.py
        bridge/test_prompt_cache.py
        bridge/test_table.py
        cache/test_model_cache.py::test_interrupted_steps
        cache/test_pool.py::test_what_a_long_context_takes_is_bounded
        cache/test_snapshot.py::test_the_next_tokens_are_those_of_an_uninterrupted_run
        models/test_adapter.py::test_logits_are_mlx_lms
        models/test_architectures.py::test_any_tensor_that_is_missing_or_wrong_is_named
        models/test_architectures.py::test_the_plan_is_what_is_held
        models/test_experts.py::test_every_way_to_compute_them_is_mlx_lms
        models/test_formats.py
        models/test_golden.py::test_logits_are_transformers
        models/test_matrix.py::test_every_format_shape_and_way
        operators/test_exact_rows.py::test_long_contexts_of_every_length
        operators/test_exact_rows.py::test_tiles_of_every_length
        operators/test_pmx.py::test_against_the_oracle
        operators/test_pmx.py::test_long_contexts
        operators/test_pmx_errors.py
        operators/test_score_blocks.py::test_blocks_on_a_gpu_are_attention
        ranks/test_divided.py::test_a_ranks_cache
        ranks/test_divided.py::test_logits
        ranks/test_divided.py::test_what_a_token_sends
        ranks/test_shares.py::test_only_the_share_is_read
        server/test_interfaces.py::test_a_forced_call_that_is_cut_is_no_text
        text/test_tokenizer.py::test_ids_and_text
        tools/bench/test_shapes.py
        tools/convert/test_convert.py
        tools/gguf/test_importer.py
        tools/report/test_report.py::TestBrokenFormats::test_it_shows
        tools/report/test_report.py::TestTeacherForcing::test_chunks_are_token_by_token
    """,
    "kernel": """
        bridge/test_hook.py::test_rows_that_the_kernel_serves_are_not_computed
        bridge/test_hook.py::test_the_kernel_serves_chunks
        bridge/test_pool_bridged_fused.py
        cache/test_layer.py::test_the_fused_kernel_agrees_through_a_window
        cache/test_layer.py::test_the_fused_kernel_is_the_same_attention
        cache/test_pool_fused.py
        cache/test_pool_machine.py::test_any_order_with_the_fused_kernel
        operators/kernels/test_dispatch.py::test_generation_is_the_same_either_way
        operators/kernels/test_dispatch.py::test_the_operator_is_the_oracle_s_either_way
        operators/kernels/test_kernel.py
        operators/kernels/test_kernel_code.py
        operators/kernels/test_kernel_mutations.py
        operators/kernels/test_probe.py
        support/test_metal_host.py
    """,
    "process": """
        cache/test_disk.py::test_kill_9_at_any_moment
        cache/test_snapshot_faults.py::test_killed_while_it_writes
        cli/chat/test_on_a_terminal.py
        cli/test_bench_cli.py
        cli/test_cli.py
        cli/test_drafts_cli.py
        cli/test_head_widths.py::test_every_command_starts_without_a_flag_and_says_the_group
        cli/test_head_widths.py::test_reports_and_benchmarks_of_it
        cli/test_import.py::test_a_killed_imports_leftovers_are_removed
        cli/test_import.py::test_an_interrupted_import_leaves_nothing
        cli/test_interrupts.py
        cli/test_kernel_start.py
        cli/test_plan_cli.py::test_machines_that_are_alike
        cli/test_prompt_cache_file.py
        cli/test_ranks.py
        cli/test_simulated_mac.py
        cli/test_start.py
        names/test_keywords.py::test_no_other_library_comes_along
        plan/test_memory_plan.py
        plan/test_rank_plan.py
        ranks/test_bridged_stage.py
        ranks/test_guard.py
        ranks/test_lead.py
        server/test_bodies.py::test_an_end_leaves_no_stopped_process
        server/test_connections.py
        server/test_run.py
        test_blas.py
        tools/bench/test_bench_worker.py
        tools/bench/test_server_client.py::test_a_long_answer_is_waited_for_while_text_comes
        tools/bench/test_server_client.py::test_waiting_ends
        tools/doctor/test_doctor.py
        tools/gguf/test_package.py
        weights/test_pull.py
    """,
    "hostile": """
        cli/test_hostile_kinds.py
        models/test_adapter.py::test_more_keys_or_tensors_than_the_model_has
        models/test_hostile.py
        models/test_hostile_files.py
        server/test_bodies.py::test_many_entries_do_not_hold_the_loop
        server/test_bodies.py::test_no_body_holds_the_server
        test_errors.py::test_a_hostile_name
        test_patterns.py
        text/test_answer_parts.py::test_a_call_that_goes_on_without_end
        text/test_grammar.py::test_compiling_has_an_end
        text/test_template.py::test_a_hostile_template
        text/test_tokenizer_limits.py
        tools/gguf/test_gguf_fuzz.py
    """,
    "slow": """
        bridge/test_checkpoints.py
        bridge/test_disk_cache.py
        bridge/test_snapshot_bridged.py
        cache/test_exact_tail.py::test_ctrl_c_and_the_same_batch_again
        cache/test_exact_tail.py::test_ctrl_c_at_any_line_of_a_step
        cache/test_pool_machine.py::test_any_order
        cache/test_quality.py::test_eight_bits_cost_nothing_that_matters_and_smaller_groups_cost_less
        cli/chat/test_commands.py::test_without_a_seed_a_retry_differs_and_with_one_the_conversation_is_the_same_again
        engine/test_answer_errors.py::test_an_interruption_ends_all_and_the_scheduler_goes_on
        engine/test_batch_drafts.py
        engine/test_constraint.py::test_random_schemas
        engine/test_conversation.py::test_memory_stays_through_ten_forgettings
        engine/test_conversation_kinds.py
        engine/test_drafts.py
        engine/test_drafts_composed.py
        engine/test_draws.py
        engine/test_engine.py::test_a_long_prefill_peaks_no_higher_than_mlx_lms_with_its_default_cache
        engine/test_key_transforms.py
        engine/test_prefix_replays.py
        engine/test_scheduler_company.py
        engine/test_threads.py
        models/test_pocket.py::test_a_story_is_about_whom_it_was_asked_for
        names/test_keywords.py::test_a_cache_of_either_kind_of_model
        names/test_keywords.py::test_a_group_that_does_not_divide_a_bridged_models_width
        tools/evidence/test_evidence.py::test_any_value_may_be_any_other
        tools/evidence/test_evidence.py::test_every_part_is_measured_kept_and_checked
        tools/report/test_reference.py::test_the_report
        tools/report/test_report_inputs.py
        tools/report/test_tasks.py
        tools/report/test_tune.py
    """,
    "release": """
        names/test_llm_plugin.py
        names/test_scripts.py
        scripts
        test_selection.py::test_all_markers_and_the_default_run_are_every_test
        test_selection.py::test_every_name_of_the_selection_is_a_tests
    """,
}
SAMPLES = """
    bridge/test_bridged_cache.py::test_a_step_that_is_not_committed_leaves_no_trace[qwen3_next-4]
    bridge/test_bridged_cache.py::test_bytes_are_known_before_and_the_same_after[falcon_h1]
    bridge/test_bridged_cache.py::test_bytes_are_known_before_and_the_same_after[gpt_oss]
    bridge/test_bridged_cache.py::test_bytes_are_known_before_and_the_same_after[qwen3]
    bridge/test_bridged_cache.py::test_bytes_are_known_before_and_the_same_after[qwen3_next]
    bridge/test_bridged_cache.py::test_pages_of_windows_move[gpt_oss]
    bridge/test_checkpoints.py::test_a_conversation_goes_back[qwen3_next]
    bridge/test_disk_cache.py::test_a_turn_reads_only_what_is_new[gpt_oss-8]
    bridge/test_few_rows.py::test_the_logits_are_mlx_lms[deepseek_v3]
    bridge/test_few_rows.py::test_the_logits_are_mlx_lms[gemma3_text]
    bridge/test_few_rows.py::test_the_logits_are_mlx_lms[llama]
    bridge/test_few_rows.py::test_the_logits_are_mlx_lms[qwen3_next]
    bridge/test_folder.py::test_generate[gemma3-0]
    bridge/test_folder.py::test_generate[gpt-oss-0]
    bridge/test_folder.py::test_generate[qwen3-next-0]
    bridge/test_mounted.py::test_batches_give_each_sequence_what_it_gets_alone[gemma3_text-4]
    bridge/test_mounted.py::test_batches_give_each_sequence_what_it_gets_alone[qwen3-8]
    bridge/test_prompt_cache.py::test_mlx_lms_loop_gives_mlx_lms_tokens[gpt_oss]
    bridge/test_prompt_cache.py::test_mlx_lms_loop_gives_mlx_lms_tokens[qwen3]
    bridge/test_prompt_cache.py::test_mlx_lms_loop_gives_mlx_lms_tokens[qwen3_next]
    bridge/test_snapshot_bridged.py::test_a_random_life[gemma3_text]
    bridge/test_table.py::test_an_architecture_through_kvant_s_cache[deepseek_v3]
    bridge/test_table.py::test_an_architecture_through_kvant_s_cache[gemma3_text]
    bridge/test_table.py::test_an_architecture_through_kvant_s_cache[gpt_oss]
    bridge/test_table.py::test_an_architecture_through_kvant_s_cache[llama]
    bridge/test_table.py::test_an_architecture_through_kvant_s_cache[qwen3_next]
    cache/test_exact_tail.py::test_ctrl_c_at_any_line_of_a_step[40-130]
    cache/test_exact_tail.py::test_ctrl_c_at_any_line_of_a_step[40-2]
    cache/test_model_cache.py::test_interrupted_steps[8]
    cache/test_pool.py::test_what_a_long_context_takes_is_bounded[1-8]
    cache/test_pool.py::test_what_a_long_context_takes_is_bounded[4-0]
    cache/test_pool_fused.py::test_an_engine_on_the_kernels_text[8-None]
    cache/test_pool_machine.py::test_any_order[8]
    cache/test_snapshot.py::test_the_next_tokens_are_those_of_an_uninterrupted_run[110-{'kv_bits': 0}]
    cache/test_snapshot.py::test_the_next_tokens_are_those_of_an_uninterrupted_run[128-{'kv_bits': 8}]
    cache/test_snapshot.py::test_the_next_tokens_are_those_of_an_uninterrupted_run[300-{'kv_bits': 8}]
    cli/test_cli.py::test_generated_text
    engine/test_answer_errors.py::test_an_interruption_ends_all_and_the_scheduler_goes_on[True]
    engine/test_constraint.py::test_random_schemas[8]
    engine/test_conversation_kinds.py::test_turns_and_forgettings[gpt_oss-8]
    engine/test_conversation_kinds.py::test_turns_and_forgettings[qwen2-4]
    engine/test_drafts.py::test_the_same_text_and_cache[known-0-filtered]
    engine/test_drafts.py::test_the_same_text_and_cache[known-4-processed]
    engine/test_drafts.py::test_the_same_text_and_cache[own-8-filtered]
    engine/test_drafts.py::test_the_same_text_and_cache[small-8-greedy]
    engine/test_scheduler_company.py::test_tokens_are_those_of_a_request_alone[8]
    models/test_adapter.py::test_logits_are_mlx_lms[qwen2]
    models/test_architectures.py::test_any_tensor_that_is_missing_or_wrong_is_named[qwen2]
    models/test_architectures.py::test_any_tensor_that_is_missing_or_wrong_is_named[qwen3_moe]
    models/test_architectures.py::test_the_plan_is_what_is_held[weights0-qwen2-True]
    models/test_architectures.py::test_the_plan_is_what_is_held[weights1-llama-False]
    models/test_architectures.py::test_the_plan_is_what_is_held[weights1-olmo2-True]
    models/test_architectures.py::test_the_plan_is_what_is_held[weights2-qwen3_moe-True]
    models/test_experts.py::test_every_way_to_compute_them_is_mlx_lms[numbers0-True-dense]
    models/test_experts.py::test_every_way_to_compute_them_is_mlx_lms[numbers1-True-adapted]
    models/test_experts.py::test_every_way_to_compute_them_is_mlx_lms[numbers2-False-quantized]
    models/test_golden.py::test_logits_are_transformers[llama llama3]
    models/test_golden.py::test_logits_are_transformers[llama-bias default]
    models/test_golden.py::test_logits_are_transformers[mistral linear]
    models/test_golden.py::test_logits_are_transformers[mistral window]
    models/test_golden.py::test_logits_are_transformers[olmo2 default]
    models/test_golden.py::test_logits_are_transformers[qwen2 default]
    models/test_golden.py::test_logits_are_transformers[qwen2 dynamic]
    models/test_golden.py::test_logits_are_transformers[qwen2 old]
    models/test_golden.py::test_logits_are_transformers[qwen3 yarn]
    models/test_golden.py::test_logits_are_transformers[qwen3-moe default]
    models/test_golden.py::test_logits_are_transformers[smollm3 default]
    operators/kernels/test_dispatch.py::test_the_operator_is_the_oracle_s_either_way[changes0-8]
    operators/kernels/test_probe.py::test_the_kernel_itself_is_right_on_the_host
    operators/test_exact_rows.py::test_tiles_of_every_length[110-18]
    operators/test_exact_rows.py::test_tiles_of_every_length[130-40]
    operators/test_pmx.py::test_against_the_oracle[0]
    operators/test_pmx.py::test_against_the_oracle[500]
    operators/test_pmx.py::test_long_contexts[lengths0-0-how0]
    operators/test_pmx.py::test_long_contexts[lengths2-4-how2]
    operators/test_score_blocks.py::test_blocks_on_a_gpu_are_attention[causal-64-dtype0]
    operators/test_score_blocks.py::test_blocks_on_a_gpu_are_attention[sinks-256-dtype1]
    operators/test_score_blocks.py::test_blocks_on_a_gpu_are_attention[window-64-dtype1]
    ranks/test_divided.py::test_a_ranks_cache[2-qwen2-2]
    ranks/test_divided.py::test_logits[2-moe]
    ranks/test_divided.py::test_logits[2-pipeline]
    ranks/test_divided.py::test_logits[2-qwen2]
    ranks/test_divided.py::test_what_a_token_sends[2-pipeline]
    ranks/test_divided.py::test_what_a_token_sends[2-qwen2]
    ranks/test_shares.py::test_only_the_share_is_read[llama-config1-4-stacked]
    ranks/test_shares.py::test_only_the_share_is_read[moe, each-config4-0-each]
    server/test_interfaces.py::test_a_forced_call_that_is_cut_is_no_text[messages]
    text/test_tokenizer.py::test_ids_and_text[llama2]
    text/test_tokenizer.py::test_ids_and_text[llama3]
    text/test_tokenizer.py::test_ids_and_text[pocket]
    text/test_tokenizer.py::test_ids_and_text[qwen3]
    text/test_tokenizer.py::test_ids_and_text[smollm2]
    text/test_tokenizer.py::test_ids_and_text[unigram]
    tools/gguf/test_gguf_fuzz.py::test_mutated_files[smollm2-0]
    tools/gguf/test_importer.py::test_a_type[Q4_K-0.003]
    tools/gguf/test_importer.py::test_an_architecture[Q4_1-llama]
    tools/gguf/test_importer.py::test_an_architecture[Q4_1-qwen2]
    tools/gguf/test_importer.py::test_types_side_by_side
    tools/gguf/test_package.py::test_it_is_fetched_verified_and_imported_once
    tools/gguf/test_package.py::test_without_pip
    tools/report/test_report.py::TestBrokenFormats::test_it_shows[a scale-layers0]
    tools/report/test_report.py::TestTeacherForcing::test_chunks_are_token_by_token[cache_format0]
"""


MARKED = {name.strip(): marker for marker, names in MARKS.items() for name in names.strip().splitlines()}
KEPT = [name.strip() for name in SAMPLES.strip().splitlines()]
DEFAULT = f"not ({' or '.join(MARKS)})"  # what a plain ``pytest`` runs


def covers(name: str, test: str) -> bool:
    """Whether a file's, a folder's, a function's or a case's name is that of a test or of what the test is
    in.
    """
    return test == name or (test.startswith(name) and re.match(r"/|::|\[", test[len(name) :]) is not None)


def markers(test: str) -> list[str]:
    """Return the markers of a test, named relative to ``tests``; none for those of the default run."""
    if any(covers(name, test) for name in KEPT):
        return []
    return list(dict.fromkeys(marker for name, marker in MARKED.items() if covers(name, test)))


def is_left_out(file: str) -> bool:
    """Whether the default run has no test of a file, named relative to ``tests``: it need not be imported."""
    return bool(markers(file)) and not any(covers(file, name) for name in KEPT)
