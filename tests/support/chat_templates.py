"""Chat templates that write messages, tools and calls as the published families do, and little else."""

TEMPLATES = {
    "qwen2": """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for call in message.tool_calls %}
        {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "qwen3": """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson(ensure_ascii=true) }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    "llama3": """
{{- bos_token }}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nDate: " + date_string | default("26 Jul 2024") + "<|eot_id|>" }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- messages[0]['content'] | trim + "<|eot_id|>" }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("One call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" }}
    {%- else %}{{- message.content | trim }}
    {%- endif %}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "mistral": """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools %}{{- " [AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
        {{- " [INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {{- " [TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("an id has length 9!") }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message.role == "assistant" %}{{- " " + message.content | trim + eos_token }}
    {%- elif message.role == "tool" %}
        {{- ' [TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
""",
    "qwen3_coder": """
{%- for tool in tools or [] %}
    {{- '<|im_start|>system\\n<function>\\n<name>' ~ tool.function.name ~ '</name>\\n</function><|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- value | tojson | safe if value is mapping else value | string }}{{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "mistral_args": """
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson | safe }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('who is ' + message['role'] + '?') }}
    {%- endif %}
{%- endfor %}
""",
}
# The tokenizer of support.tokenizers_made, where its name is another.
TOKENIZERS = {"qwen3_coder": "qwen3", "mistral_args": "mistral"}
