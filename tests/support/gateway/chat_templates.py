"""Eighteen chat templates with the branches and checks of public ones, written for these tests.

What differs between them is what matters here: the roles they write, where, in what form, and what they refuse.
"""

_CHATML_TURN = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
_CHATML_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_SYSTEM_FIRST = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}"
)
_ALTERNATE = (
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
)

CHAT_TEMPLATES = {
    # Any role, by its name.
    "chatml": "{%- for message in messages %}" + _CHATML_TURN + "{%- endfor %}" + _CHATML_END,
    # Only the roles of its model; a developer falls through.
    "qwen2.5": (
        "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or "
        "(message.role == 'assistant' and not message.tool_calls) %}" + _CHATML_TURN + "{%- elif message.role == "
        "'assistant' %}{{- '<|im_start|>assistant\\n<tool_call>' + message.tool_calls[0].function.name }}"
        "{{- '</tool_call><|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
        "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
        "{%- endif %}{%- endfor %}" + _CHATML_END
    ),
    # Thoughts of earlier answers are cut.
    "qwen3": (
        "{%- for message in messages %}{%- if message.role == 'assistant' %}"
        "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
        "{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}"
        "{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}"
        "{{- '\\n</tool_response><|im_end|>\\n' }}{%- elif message.role in ('system', 'user') %}"
        + _CHATML_TURN
        + "{%- endif %}{%- endfor %}"
        + _CHATML_END
    ),
    # The system message goes into the first question.
    "llama 2": (
        _SYSTEM_FIRST + "{%- for message in rest %}" + _ALTERNATE + "{%- if loop.first and system %}"
        "{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
        "{%- else %}{%- set content = message['content'] %}{%- endif %}{%- if message['role'] == 'user' %}"
        "{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{%- elif message['role'] == 'assistant' %}"
        "{{- ' ' + content.strip() + ' ' + eos_token }}{%- endif %}{%- endfor %}"
    ),
    "llama 3": (
        "{%- for message in messages %}{%- if loop.first %}{{- bos_token }}{%- endif %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
        "{{- '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
    ),
    # A tool's result becomes JSON.
    "llama 3.1": (
        _SYSTEM_FIRST + "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}"
        "{%- for message in rest %}{%- if message.role == 'tool' or message.role == 'ipython' %}"
        "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}"
        "{%- elif message.tool_calls is defined %}{{- message.tool_calls[0] | tojson }}{%- else %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
        "{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    ),
    "mistral 0.1": (
        "{{- bos_token }}{%- for message in messages %}" + _ALTERNATE + "{%- if message['role'] == 'user' %}"
        "{{- '[INST] ' + message['content'] + ' [/INST]' }}{%- elif message['role'] == 'assistant' %}"
        "{{- message['content'] + eos_token }}{%- else %}{{- raise_exception('only user and assistant roles') }}"
        "{%- endif %}{%- endfor %}"
    ),
    # The system message goes into the last question; tools need ids.
    "mistral 0.3": (
        _SYSTEM_FIRST + "{{- bos_token }}{%- for message in rest %}{%- if message['role'] == 'user' %}"
        "{%- if loop.last and system %}{{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}"
        "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
        "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}"
        "{%- elif message['role'] in ('tool', 'tool_results') %}{%- if message.tool_call_id | length != 9 %}"
        "{{- raise_exception('tool call ids have 9 characters') }}{%- endif %}"
        "{{- '[TOOL_RESULTS] {\"content\": ' + message['content'] | tojson + '}[/TOOL_RESULTS]' }}"
        "{%- else %}{{- raise_exception('only user, assistant and tool roles') }}{%- endif %}{%- endfor %}"
    ),
    "gemma": (
        "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{{- raise_exception('no system role') }}{%- endif %}"
        "{%- for message in messages %}" + _ALTERNATE + "{%- if message['role'] == 'assistant' %}"
        "{%- set role = 'model' %}{%- else %}{%- set role = message['role'] %}{%- endif %}"
        "{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
    ),
    # An early one, which passes over system messages.
    "phi 3": (
        "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
        "{{- '<|user|>\\n' + message['content'] + '<|end|>\\n<|assistant|>\\n' }}"
        "{%- elif message['role'] == 'assistant' %}{{- message['content'] + '<|end|>\\n' }}{%- endif %}{%- endfor %}"
    ),
    "phi 4": (
        "{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{{- '<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>' }}"
        "{%- elif message['role'] == 'user' %}{{- '<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>' }}"
        "{%- elif message['role'] == 'assistant' %}"
        "{{- '<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"
    ),
    "zephyr": (
        "{%- for message in messages %}{%- if message['role'] == 'user' %}"
        "{{- '<|user|>\\n' + message['content'] + eos_token }}{%- elif message['role'] == 'system' %}"
        "{{- '<|system|>\\n' + message['content'] + eos_token }}{%- elif message['role'] == 'assistant' %}"
        "{{- '<|assistant|>\\n' + message['content'] + eos_token }}{%- endif %}"
        "{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}{%- endfor %}"
    ),
    "vicuna": (
        _SYSTEM_FIRST + "{{- system }}{%- for message in rest %}{%- if message['role'] == 'user' %}"
        "{{- ' USER: ' + message['content'].strip() }}{%- elif message['role'] == 'assistant' %}"
        "{{- ' ASSISTANT: ' + message['content'].strip() + eos_token }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- ' ASSISTANT:' }}{%- endif %}"
    ),
    # The last system message wins, wherever it is; thoughts are cut.
    "deepseek r1": (
        "{%- set ns = namespace(system='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{%- set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{- bos_token + ns.system }}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}"
        "{%- elif message['role'] == 'assistant' and message['content'] is not none %}"
        "{{- '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}"
        "{%- elif message['role'] == 'tool' %}{{- '<|tool_output_begin|>' + message['content'] }}"
        "{{- '<|tool_output_end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}"
    ),
    "command r": (
        _SYSTEM_FIRST + "{{- bos_token }}{%- if system %}{{- '<|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN|>' }}"
        "{%- endif %}{%- for message in rest %}" + _ALTERNATE + "{%- if message['role'] == 'user' %}"
        "{{- '<|USER_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN|>' }}"
        "{%- elif message['role'] == 'assistant' %}"
        "{{- '<|CHATBOT_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|CHATBOT_TOKEN|>' }}{%- endif %}"
    ),
    # It knows developers; the first of them or the system message is the model's instruction.
    "gpt-oss": (
        "{{- '<|start|>system<|message|>You are a model.<|end|>' }}"
        "{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}"
        "{{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}"
        "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
        "{%- for message in rest %}{%- if message.role == 'assistant' and 'tool_calls' in message %}"
        "{%- set ns = namespace(tool=message.tool_calls[0].function.name) %}{{- '<|start|>call ' + ns.tool }}"
        "{%- elif message.role == 'assistant' %}{{- '<|start|>assistant<|message|>' + message.content + '<|end|>' }}"
        "{%- elif message.role == 'tool' %}{%- if loop.first or 'tool_calls' not in loop.previtem %}"
        "{{- raise_exception('a tool result without a call') }}{%- endif %}"
        "{{- '<|start|>functions<|message|>' + message.content | tojson + '<|end|>' }}"
        "{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
    ),
    "granite": (
        _SYSTEM_FIRST + "{{- '<|start_of_role|>system<|end_of_role|>' + (system or 'Be helpful.') + eos_token }}"
        "{%- for message in rest %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}"
        "{{- message['content'] + eos_token }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
    ),
    # Upper case names and a check of the last role.
    "openchat": (
        "{{- bos_token }}{%- for message in messages %}{%- if message['role'] in ('user', 'assistant') %}"
        "{{- 'GPT4 Correct ' + message['role'].title() + ': ' + message['content'] + '<|end_of_turn|>' }}"
        "{%- elif message['role'] == 'system' %}{{- message['content'] + '<|end_of_turn|>' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- 'GPT4 Correct Assistant:' }}{%- endif %}"
    ),
}
