"""Chat templates compared with transformers' ``apply_chat_template``, on typical templates."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from stoker_common.errors import RequestError
from stoker_engine.tokens import chat_template
from stoker_engine.tokens.tokenizer import Tokenizer

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{% else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: ipython\\n" }}{% endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}{% endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if not message.tool_calls|length == 1 %}{{ raise_exception("one tool call at a time") }}{% endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
    {{- tool_call.arguments | tojson }}{{ "}<|eot_id|>" }}
  {%- else %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
    {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
    {%- else %}{{ message.content }}{% endif %}{{ "<|eot_id|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, multi=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" %}{% set ns.multi = false %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{ content.lstrip('\\n') }}{% endgeneration %}{{ '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {{- prefix if loop.first else "" }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

DOCUMENTS = """{% for document in documents or [] %}
Document {{ loop.index }}: {{ document.title }}
{% for word in document.text.split() %}
{% if loop.index > 3 %}{% break %}{% endif %}
{{ word }}
{% endfor %}
{% endfor %}
{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
[{{ m.role }}] {{ m.content }} {{ dict(a=1) }}
{% endfor %}{{ strftime_now("%Y") }}{{ {"ü": "<&'"} | tojson }}"""

TEMPLATES = {"llama 3": LLAMA_3, "chatml": CHATML, "gemma": GEMMA, "documents": DOCUMENTS}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like in a <city>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "  What's the weather in Zürich? 🌦 "}
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Rain.", "name": None}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": " hello "}]}]},
    "tools": {"messages": [USER], "tools": [TOOL]},
    "tool messages": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ],
        "tools": [TOOL],
    },
    "documents": {"messages": [USER], "documents": [{"title": "T", "text": "one two three four"}]},
    "no prompt": {"messages": [USER], "add_generation_prompt": False},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "It will be "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "Rain.", "reasoning": "\nhm\n"}]},
    "variables": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "date_string": "today"}},
    "empty": {"messages": []},
}


CALLS = {
    "string or JSON": "{{ a if a is string else a | tojson }}",
    "as JSON": "{{ a | tojson }}",
    "added": "{{ '' + (a | string) }}",
    "items": "{% for k, v in a.items() %}<{{ k }}>{{ v }}{% endfor %}",
    "items filter": "{% for k, v in a | items %}<{{ k }}>{{ v }}{% endfor %}",
    "dictsort": "{% for k, v in a | dictsort %}<{{ k }}>{{ v }}{% endfor %}",
    "mappings only": "{{ a | tojson if a is mapping else raise_exception('an object is wanted') }}",
}


@pytest.mark.parametrize("arguments", ["{'city': Zü", "no JSON", "[1, 2"])
@pytest.mark.parametrize("how", CALLS)
def test_calls_with_malformed_arguments_are_written(byte_level: Backend, how: str, arguments: str) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% set a = c.function.arguments %}" + CALLS[how] + "{% endfor %}{% endfor %}"
    )
    cut = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, cut]}, {"role": "user", "content": "!"}]
    text = Tokenizer(byte_level, {}, template).chat_text(messages)
    assert text.startswith(USER["content"]) and text.endswith("!")
    assert "Zürich" in text and arguments in text


def test_errors_raised_by_the_template_are_reported(byte_level: Backend) -> None:
    cut = {**CALL, "function": {"name": "weather", "arguments": "cut"}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [cut]}]
    with pytest.raises(RequestError, match="no calls here"):
        Tokenizer(byte_level, {}, "{{ raise_exception('no calls here') }}").chat_text(messages)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_text_and_tokens_equal_those_of_transformers(byte_level: Backend, template: str, chat: str) -> None:
    found = Tokenizer(byte_level, {"bos_token": "<s>", "eos_token": "</s>"}, TEMPLATES[template])
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level, bos_token="<s>", eos_token="</s>")
    reference.chat_template = TEMPLATES[template]
    options = dict(CHATS[chat])
    messages = options.pop("messages")
    variables = options.get("chat_template_kwargs", {})
    call_options = {key: value for key, value in options.items() if key != "chat_template_kwargs"}
    call_options.setdefault("add_generation_prompt", True)
    only_strings = chat == "parts" and template != "gemma"
    conversation = [{"role": "user", "content": " hello "}] if only_strings else messages
    try:
        expected = reference.apply_chat_template(conversation, tokenize=False, **call_options, **variables)
    except Exception:
        with pytest.raises(RequestError):
            found.chat_text(messages, **options)
        return
    assert found.chat_text(messages, **options) == expected
    tokens = reference.apply_chat_template(conversation, tokenize=True, return_dict=False, **call_options, **variables)
    assert found.render_chat(messages, **options) == tokens


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{% set ns = namespace(__init__=1) %}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.format(messages) }}{{ 1 / 0 }}",
        "{% for %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_sandbox_violations_and_failures_are_request_errors(byte_level: Backend, template: str) -> None:
    with pytest.raises(RequestError):
        Tokenizer(byte_level, chat_template=template).chat_text([USER])


def test_templates_cannot_change_the_messages(byte_level: Backend) -> None:
    message = {"role": "user", "content": "a"}
    with pytest.raises(RequestError):
        Tokenizer(byte_level, chat_template="{{ messages[0].pop('role') }}").chat_text([message])
    assert message == {"role": "user", "content": "a"}


def test_tools_select_the_template_for_tools(byte_level: Backend) -> None:
    tokenizer = Tokenizer(byte_level, chat_template="plain", chat_template_for_tools="tools")
    assert tokenizer.chat_text([USER]) == "plain"
    assert tokenizer.chat_text([USER], tools=[TOOL]) == "tools"
    assert tokenizer.chat_text([USER], chat_template="mine") == "mine"
    with pytest.raises(RequestError, match="--chat-template"):
        Tokenizer(byte_level).chat_text([USER])


def test_models_template_is_compiled_on_load(byte_level: Backend, caplog: pytest.LogCaptureFixture) -> None:
    model_template = "{{ messages[0].content }} of a model"
    tokenizer = Tokenizer(
        byte_level, chat_template=model_template, chat_template_for_tools=model_template + " with tools"
    )
    compiled = chat_template._compiled.cache_info().misses
    tokenizer.chat_text([USER])
    tokenizer.chat_text([USER], tools=[TOOL])
    assert chat_template._compiled.cache_info().misses == compiled
    assert not caplog.records
    broken = Tokenizer(byte_level, chat_template="{% for %} of a model")
    assert "chat template is invalid" in caplog.text, "the broken template was not logged on load"
    with pytest.raises(RequestError, match="chat template"):
        broken.chat_text([USER])
