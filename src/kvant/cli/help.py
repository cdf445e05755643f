"""Group the flags in a command's help, so that the few that most people need come first."""

from typing import Any

from typer.core import TyperCommand

# By parameter; flags that are not listed here are common options.
GROUPS = {
    "Sampling options": (
        "temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold",
        "repetition_penalty", "repetition_context_size", "presence_penalty", "presence_context_size",
        "frequency_penalty", "frequency_context_size", "logit_bias", "seed",
    ),
    "Cache options": (
        "kv_bits", "max_kv_size", "kv_tail", "kv_group_size", "kv_format", "kv_bias_split", "checkpoints",
        "overflow", "prompt_cache_file", "disk_cache", "disk_cache_size",
    ),
    "Speed options": (
        "draft", "draft_model", "num_draft_tokens", "prefill_step_size", "weights", "kernels", "wired",
        "parallel",
    ),
    "Advanced options": (
        "extra_eos_token", "ignore_eos", "ignore_chat_template", "prefill", "chat_template_config",
        "deterministic", "raw",
    ),
}  # fmt: skip
COMMON = "Common options"
GROUPED = ("generate", "chat", "serve")  # commands with grouped help


class GroupedCommand(TyperCommand):
    """A command whose help lists flags by :data:`GROUPS`, in the same order."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the flags in a section per group."""
        order = {name: (title, place) for title, names in GROUPS.items() for place, name in enumerate(names)}
        sections: dict[str, list[tuple[int, tuple[str, str]]]] = {
            title: [] for title in ("Arguments", COMMON, *GROUPS)
        }
        for place, parameter in enumerate(self.get_params(ctx)):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            flag, text = record
            title, within = order.get(parameter.name or "", (COMMON, place))
            if parameter.param_type_name == "argument":
                title = "Arguments"
                flag = flag.partition(" <")[0]  # without its type
            sections[title].append((within, (flag, text)))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl([record for _, record in sorted(records)])
