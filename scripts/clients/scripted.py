"""Write a tiny Qwen2 checkpoint that answers by a script, so that agents can be run to their end: scripted.py
FOLDER

It has one layer that adds nothing: the token that follows is a matter of the last one alone. The chat
template ends a prompt with a token that begins a script: a call of one of CALLS' tools, where the user's last
message says "use the tool" or "use the patch" and has no result yet, else a sentence. So calls come under
``tool_choice: auto``, as a model writes them. Like Qwen3.5's the template wants the system's message first.
"""

import json
import sys
import sysconfig
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SAID = "Everything is in order."
COMMAND, PATCHED = "echo kvant-ok", "patched.txt"
CALLS = {  # the shell's tool of each client, and its arguments
    "Bash": {"command": COMMAND, "description": "say ok"},  # Claude Code
    "bash": {"command": COMMAND, "description": "say ok"},  # opencode
    "exec_command": {"cmd": COMMAND},  # Codex
    # newer models'
    "functions__exec": {"input": f'text((await tools.exec_command({{cmd: "{COMMAND}"}})).output);'},
    "run_shell_command": {"command": COMMAND, "description": "say ok", "is_background": False},  # Qwen Code
    # Codex
    "apply_patch": {"input": f'*** Begin Patch\n*** Add File: {PATCHED}\n+one "two"\n*** End Patch\n'},
}
END, START = "<|im_end|>", "<|im_start|>"
WIDTH, HEADS, HEAD_DIM, VOCAB, CONTEXT = 256, 4, 64, 8000, 65536
TEMPLATE = """
{%- set ns = namespace(go='say', first=messages[0]) -%}
{%- if tools or ns.first.role == 'system' -%}
<|im_start|>system
{{ ns.first.content if ns.first.role == 'system' else 'You help.' }}
{%- if tools %}

# Tools
Call a tool with <tool_call>{"name": ..., "arguments": ...}</tool_call>. These are there:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% set ns.go = 'say' -%}
{%- elif message.role != 'system' -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% if message.role == 'user' and 'use the ' in message.content -%}
{%- for tool in tools or [] if tool.function.name in CALLS
    and (tool.function.name == 'apply_patch') == ('use the patch' in message.content) -%}
{%- set ns.go = tool.function.name -%}
{%- endfor -%}
{%- elif message.role == 'user' -%}
{%- set ns.go = 'say' -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<go {{ ns.go }}>
{%- endif -%}
"""


def write(folder: Path) -> None:
    """Write the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    scripts = {"say": SAID}
    for name, arguments in CALLS.items():
        scripts[name] = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    tokenizer = _tokenizer(scripts)
    tokenizer.save(str(folder / "tokenizer.json"))
    follows = {}
    for name, text in scripts.items():
        begin, said, end = (tokenizer.token_to_id(token) for token in (f"<go {name}>", _written(text), END))
        follows |= {begin: said, said: end}
    vocab = tokenizer.get_vocab_size()
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(vocab, follows), {"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": WIDTH,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "float32",
    }
    template = TEMPLATE.replace("CALLS", json.dumps(list(CALLS)))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    for name, content in (
        ("config", config),
        ("tokenizer_config", told),
        ("generation_config", {"do_sample": False}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _tokenizer(scripts: dict[str, str]) -> Tokenizer:
    """A byte-level one, trained on the modules of Python's library; each script is one token."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    found.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))], trainer)
    described = json.loads(found.to_str())
    vocab = described["model"]["vocab"]
    vocab |= {_written(text): len(vocab) + number for number, text in enumerate(scripts.values())}
    found = Tokenizer.from_str(json.dumps(described))
    special = [START, END, *(f"<go {name}>" for name in scripts)]
    found.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return found


def _written(text: str) -> str:
    """A text as a byte-level vocabulary has it."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def _weights(vocab: int, follows: dict[int, int]) -> dict[str, mx.array]:
    """A layer of zeros, and a head whose row of a token has the embeddings of those that it follows."""
    embedding = mx.random.normal((vocab, WIDTH), key=mx.random.key(0))
    head = mx.zeros((vocab, WIDTH)).at[mx.array([*follows.values()])].add(embedding[mx.array([*follows])])
    ones, inner = mx.ones(WIDTH), HEADS * HEAD_DIM
    layer = {
        **{f"self_attn.{name}_proj.weight": mx.zeros((inner, WIDTH)) for name in "qkv"},
        **{f"self_attn.{name}_proj.bias": mx.zeros(inner) for name in "qkv"},
        "self_attn.o_proj.weight": mx.zeros((WIDTH, inner)),
        **{f"mlp.{name}_proj.weight": mx.zeros((WIDTH, WIDTH)) for name in ("gate", "up", "down")},
        **{f"{name}_layernorm.weight": ones for name in ("input", "post_attention")},
    }
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": head,
        **{f"model.layers.0.{name}": array for name, array in layer.items()},
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]))
