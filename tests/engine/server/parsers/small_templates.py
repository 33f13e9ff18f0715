"""Minimal chat templates with the features by which parsers are chosen."""

from __future__ import annotations

from typing import Final

_CHAT: Final = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[user]' + message.content + '<|im_end|>' }}
{%- else %}{{ '[bot]' + message.content }}CALLS{{ '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}PROMPT{%- endif %}"""

_EACH: Final = "{%- for call in message.tool_calls or [] %}{%- set f = call.function %}EACH{%- endfor %}"
_WHOLE: Final = "{%- if message.tool_calls %}EACH{%- endif %}"

#: Formats of calls; each name starts with that of the parser.
CALLS: Final[dict[str, str]] = {
    "hermes": _EACH.replace(
        "EACH",
        r"""{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\n</tool_call>' }}""",
    ),
    "hermes, on lines": _EACH.replace(
        "EACH",
        """{{ '
<tool_call>
{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}{{ '}
</tool_call>' }}""",
    ),
    "granite4": "{%- set role = '<|start_of_role|>' %}"
    + _EACH.replace(
        "EACH",
        r"""{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\n</tool_call>' }}""",
    ),
    "granite": "{%- set role = '<|start_of_role|>' %}"
    + _WHOLE.replace("EACH", "{{ '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson }}"),
    "mistral": "{%- if tools %}[AVAILABLE_TOOLS]{%- endif %}"
    + _WHOLE.replace("EACH", "{{ '[TOOL_CALLS]' + message.tool_calls | map(attribute='function') | list | tojson }}"),
    "llama3_json": "{%- if message.role == 'tool' %}<|start_header_id|>ipython{%- endif %}"
    + _EACH.replace(
        "EACH",
        """{{ '{"name": "' + f.name + '", ' }}{{ '"parameters": ' + f.arguments | tojson + '}<|eot_id|>' }}""",
    ),
    "qwen3_coder": _EACH.replace(
        "EACH",
        r"""{{ '<tool_call>\n<function=' + f.name + '>\n' }}{%- for key, value in f.arguments.items() %}"""
        r"""{{ '<parameter=' + key + '>\n' + value | string + '\n</parameter>\n' }}{%- endfor %}"""
        r"""{{ '</function>\n</tool_call>' }}""",
    ),
    "glm45": _EACH.replace(
        "EACH",
        "{{ '<tool_call>' + f.name }}{%- for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ value }}</arg_value>{%- endfor %}{{ '</tool_call>' }}",
    ),
    "deepseek_v31": _WHOLE.replace("EACH", "<｜tool▁calls▁begin｜>" + _EACH + "<｜tool▁calls▁end｜>").replace(
        "EACH", "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
    ),
    "deepseek_v3": _WHOLE.replace("EACH", "<｜tool▁calls▁begin｜>" + _EACH + "<｜tool▁calls▁end｜>").replace(
        "EACH",
        r"""<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name + '\n```json\n' + f.arguments | tojson + '\n```' }}"""
        "<｜tool▁call▁end｜>",
    ),
    "kimi_k2": _WHOLE.replace("EACH", "<|tool_calls_section_begin|>" + _EACH + "<|tool_calls_section_end|>").replace(
        "EACH",
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
    ),
}

#: Features of these templates by which a parser is chosen. Without any one of them another parser is chosen, or usually
#: none.
MARKS: Final[dict[str, list[str]]] = {
    "hermes": [r"<tool_call>\n{", '"name": "', '"arguments": ', r"}\n</tool_call>"],
    "hermes, on lines": ["\n<tool_call>\n", '"name": "', '"arguments": ', "\n</tool_call>'"],
    "granite4": [r"<tool_call>\n{", '"name": "', '"arguments": ', r"}\n</tool_call>"],
    "granite": ["<|start_of_role|>", "<|tool_call|>"],
    "mistral": ["[TOOL_CALLS]", "[AVAILABLE_TOOLS]"],
    "llama3_json": ["<|start_header_id|>ipython", '{"name": "', '"parameters": ', "<|eot_id|>"],
    "qwen3_coder": [r"<tool_call>\n<function=", "<parameter=", "</parameter>", r"</function>\n</tool_call>"],
    "glm45": ["<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
}

#: Ends of prompts after which a model reasons by default.
REASONING: Final[dict[str, str]] = {
    "open": r"{{ '[bot]<think>\n' }}",
    "open, or closed": r"{{ '[bot]' }}{%- if enable_thinking is defined and not enable_thinking %}"
    r"{{ '<think>\n\n</think>\n\n' }}{%- else %}{{ '<think>\n' }}{%- endif %}",
    "open, or closed, in one": "[bot]"
    "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}",
    "open, and then closed": "{{ '[bot]<think>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '</think>' }}{%- endif %}",
    "closed on demand": "{{ '[bot]' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think></think>' }}{%- endif %}",
    "closed on demand, in one": "[bot]"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '' }}",
}

#: Ends of prompts after which a model does not certainly reason.
NO_REASONING: Final[dict[str, str]] = {
    "nothing": "{{ '[bot]' }}",
    "opened on demand": "{{ '[bot]' }}{%- if enable_thinking %}{{ '<think>' }}{%- endif %}",
    "opened or closed on demand": "{{ '[bot]' }}{%- if enable_thinking is defined %}"
    "{%- if enable_thinking %}{{ '<think>' }}"
    "{%- else %}{{ '<think></think>' }}{%- endif %}{%- endif %}",
    "closed always": "{{ '[bot]<think></think>' }}",
    "other tags": "{{ '[bot]<thinking>' }}",
}

#: Template in the form of gpt-oss.
HARMONY: Final = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
{%- set f = message.tool_calls[0].function %}{{ '<|start|>assistant<|channel|>commentary to=functions.' + f.name }}
{{- ' <|constrain|>json<|message|>' + f.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""


def template(calls: str = "", prompt: str = "{{ '[bot]' }}") -> str:
    """Return a template with this format of calls, and this end of prompts."""
    return _CHAT.replace("CALLS", calls).replace("PROMPT", prompt)
