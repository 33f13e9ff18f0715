"""No text is lost, whichever form of content a chat template expects, and however it reads the content."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from stoker_engine.contract.names import ContentFormat
from stoker_engine.tokens.tokenizer import Tokenizer

from .test_chat_template import CHATML, GEMMA, LLAMA_3

#: Bodies of a loop over messages `m`: each writes parts, and nothing for a string.
PARTS_ONLY = {
    "loop": "{% for p in m.content %}{{ p.text }}{% endfor %}",
    "loop by type": "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
    "through a variable": "{% set c = m.content %}{% for p in c %}{{ p['text'] }}{% endfor %}",
    "through two": "{% set a = m %}{% set c = a['content'] %}{% for p in c %}{{ p.text }}{% endfor %}",
    "selectattr": "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
    "rejectattr": "{% for p in m.content | rejectattr('type', 'equalto', 'image') %}{{ p.text }}{% endfor %}",
    "map": "{{ m.content | map(attribute='text') | join(' ') }}",
    "list": "{% for p in m.content | list %}{{ p.text }}{% endfor %}",
    "slice": "{% for p in m.content[0:] %}{{ p.text }}{% endfor %}",
    "macro": "{{ written(m.content) }}",
    "macro of the message": "{{ written_of(m) }}",
    "get": "{% for p in m.get('content', []) %}{{ p.text }}{% endfor %}",
    "namespace": "{% set ns = namespace(t='') %}{% for p in m.content %}{% set ns.t = ns.t + p.text %}{% endfor %}"
    "{{ ns.t }}",
    "inner loop of types": "{% for t in ['image', 'text'] %}{% for p in m.content %}"
    "{% if p.type == t and t == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}",
    "unless it is a string": "{% if m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}",
    "idefics": "{{ m.role | capitalize }}{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}"
    "{% endif %}{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n",
    "llava": "{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if m['role'] != 'assistant' %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] + ' ' }}{% endfor %}{% else %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ c['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}",
    "vlm2vec": "<|{{ m.role }}|>\n{% for part in m.content %}{% if part.type == 'image_url' %}<|image_1|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>\n",
}
#: Each writes one part, and nothing for a string or further parts.
FIRST_PART_ONLY = {
    "index": "{{ m.content[0].text }}",
    "first": "{{ (m['content'] | first)['text'] }}",
    "last": "{% set p = m.content | last %}{{ p.text }}",
}
#: Each writes a string; for parts it writes nothing or their repr, or raises.
STRINGS_ONLY = {
    "print": "{{ m.content }}",
    "add": "{{ '[' + m['content'] + ']' }}",
    "strip": "{{ m.content.strip() }}",
    "trim": "{{ m.content | trim }}",
    "tojson": "{{ m.content | tojson }}",
    "tilde": "{{ '<' ~ m.content ~ '>' }}",
    "else nothing": "{{ m.content if m.content is string else '' }}",
    "else the first": "{{ m.content if m.content is string else m.content[0].text }}",
    "replace": "{{ m.content.replace('\\r', '') }}",
    "split": "{{ m.content.split('</think>')[-1] }}",
}
BOTH = {
    "branches": "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}",
    "each": "{% for p in m.content %}{{ p.text if p is mapping else p }}{% endfor %}",
}
BODIES = PARTS_ONLY | FIRST_PART_ONLY | STRINGS_ONLY | BOTH

MACROS = """{% macro written(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}
{% macro written_of(m) %}{{ written(m['content']) }}{% endmacro %}"""

FIRST, SECOND = "Was ist das?\nÄh", "<b>and</b> 'this'"


def template(body: str) -> str:
    """Return a template whose messages are written by `body`."""
    return f"{MACROS}{{% for m in messages %}}[{{{{ m.role }}}}]{body}\n{{% endfor %}}"


def text(
    backend: Backend, template: str, messages: list[dict[str, Any]], content_format: ContentFormat = "auto"
) -> str:
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, template).chat_text(
        messages, chat_template_content_format=content_format
    )


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("body", BODIES)
def test_text_of_every_role_is_written_and_never_as_a_repr(byte_level: Backend, body: str) -> None:
    roles = ("system", "user", "assistant", "tool")
    question = "Was ist das?"
    for contents in itertools.product((question, [part(question)], [part(question), part("Na?")]), repeat=2):
        before = [{"role": role, "content": content} for role, content in zip(roles, contents * 2, strict=True)]
        written = text(byte_level, template(BODIES[body]), before)
        assert written.count(question) == 4
        assert written.count("Na?") == 2 * sum(content is not question and len(content) == 2 for content in contents)
        assert "'type'" not in written and '"type"' not in written


#: Whole templates, like those of models: an outer loop that checks the first part, parts collected in a namespace, one
#: message only, strings and parts distinguished, strict turns.
IDEFICS_3 = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}\
{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
VLM2VEC = """{%- if messages | length > 1 -%}
    {{ raise_exception('Embedding models should only embed one message at a time') }}
{%- endif -%}

{% set vars = namespace(parts=[], next_image_id=1) %}
{%- for message in messages -%}
    {%- for content in message['content'] -%}
        {%- if content['type'] == 'text' -%}
            {%- set vars.parts = vars.parts + [content['text']] %}
        {%- elif content['type'] == 'image' -%}
            {%- set vars.parts = vars.parts + ['<|image_{i:d}|>'.format(i=vars.next_image_id)] %}
            {%- set vars.next_image_id = vars.next_image_id + 1 %}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{{ vars.parts | join(' ') }}"""
PIXTRAL = """{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[INST]" }}
        {%- if message["content"] is not string %}
            {%- for chunk in message["content"] %}
                {%- if chunk["type"] == "text" %}
                    {{- chunk["text"] }}
                {%- elif chunk["type"] == "image" %}
                    {{- "[IMG]" }}
                {%- else %}
                    {{- raise_exception("Unrecognized content type!") }}
                {%- endif %}
            {%- endfor %}
        {%- else %}
            {{- message["content"] }}
        {%- endif %}
        {{- "[/INST]" }}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}"""
LLAMA_32_VISION = """{%- set image_ns = namespace(has_images=false) %}
{%- for message in messages %}
    {%- for content in message['content'] %}
        {%- if content['type'] == 'image' %}
            {%- set image_ns.has_images = true %}
        {%- endif %}
    {%- endfor %}
{%- endfor %}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content']|trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for content in message['content'] %}
                {%- if content['type'] == 'image' %}
                    {{- '<|image|>' }}
                {%- elif content['type'] == 'text' %}
                    {{- content['text'] }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|eot_id|>' }}
{%- endfor %}"""
#: Each with the roles of the conversations that it accepts.
WHOLE = {
    "idefics 3": (IDEFICS_3, ["user", "system user", "user assistant user"]),
    "vlm2vec": (VLM2VEC, ["user"]),
    "pixtral": (PIXTRAL, ["user", "user assistant user"]),
    "llama 3.2 vision": (LLAMA_32_VISION, ["user", "system user", "user assistant user"]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_templates_write_all_text_in_every_form(byte_level: Backend, name: str) -> None:
    given, conversations = WHOLE[name]
    for conversation in conversations:
        roles = conversation.split()
        for forms in itertools.product((0, 1, 2), repeat=len(roles)):
            texts = [[f"one{index}x", f"two{index}x"][: max(form, 1)] for index, form in enumerate(forms)]
            messages: list[dict[str, Any]] = [
                {"role": role, "content": [part(each) for each in texts_of_role] if form else texts_of_role[0]}
                for role, form, texts_of_role in zip(roles, forms, texts, strict=True)
            ]
            written = text(byte_level, given, messages)
            assert all(written.count(each) == 1 for texts_of_role in texts for each in texts_of_role)
            assert "'type'" not in written


@pytest.mark.parametrize("body", PARTS_ONLY | BOTH)
def test_parts_stay_separate_if_the_template_reads_parts(byte_level: Backend, body: str) -> None:
    written = text(byte_level, template(BODIES[body]), [{"role": "user", "content": [part(FIRST), part(SECOND)]}])
    assert FIRST in written and SECOND in written
    assert FIRST + "\n" + SECOND not in written


@pytest.mark.parametrize("body", STRINGS_ONLY | FIRST_PART_ONLY)
def test_parts_are_joined_if_the_template_reads_strings(byte_level: Backend, body: str) -> None:
    written = text(byte_level, template(BODIES[body]), [{"role": "user", "content": [part("one"), part("two")]}])
    assert ("one\\ntwo" if body == "tojson" else "one\ntwo") in written


@pytest.mark.parametrize("content", ["hi", [part("hi")], [part("hi"), part("ho")]], ids=["string", "part", "parts"])
def test_explicit_content_format_is_followed(byte_level: Backend, content: Any) -> None:
    shown = template("{{ 'string' if m.content is string else m.content | length }}")
    messages = [{"role": "user", "content": content}]
    assert text(byte_level, shown, messages, "string") == "[user]string\n"
    assert text(byte_level, shown, messages, "openai") == f"[user]{1 if isinstance(content, str) else len(content)}\n"


def test_content_format_is_chosen_per_role(byte_level: Backend) -> None:
    # Like Gemma 3's: the first part of a system message, and all parts of other messages.
    gemma = """{% if messages[0].role == 'system' %}{% if messages[0].content is string %}{{ messages[0].content }}
{% else %}{{ messages[0].content[0].text }}{% endif %}{% set messages = messages[1:] %}{% endif %}"""
    given = [{"role": role, "content": [part("one"), part("two")]} for role in ("system", "user")]
    written = text(byte_level, gemma + template(BOTH["branches"]), given)
    assert "one\ntwo\n" in written and "[user]onetwo" in written


@pytest.mark.parametrize("given", [LLAMA_3, CHATML, GEMMA], ids=["llama 3", "chatml", "gemma"])
def test_parts_equal_joined_strings_for_text_templates(byte_level: Backend, given: str) -> None:
    parts = [{"role": "user", "content": [part("one"), part("two")]}]
    strings = [{"role": "user", "content": "onetwo" if given is GEMMA else "one\ntwo"}]
    assert text(byte_level, given, parts) == text(byte_level, given, strings)


def test_last_message_can_be_continued_in_every_format(byte_level: Backend) -> None:
    for body in ("loop", "print", "branches", "index"):
        tokenizer = Tokenizer(byte_level, {}, template(BODIES[body]))
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The end is"}]
        written = tokenizer.chat_text(messages, add_generation_prompt=False, continue_final_message=True)
        assert written.endswith("The end is")


def test_content_without_text_is_unchanged(byte_level: Backend) -> None:
    image = [{"type": "image", "url": "x"}]
    shown = template("{{ m.content | tojson if m.content is defined else 'none' }}")
    messages = [{"role": "user", "content": image}, {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert text(byte_level, shown, messages).count("none") == 2
    assert '"url": "x"' in text(byte_level, shown, messages)


def test_template_that_ignores_user_messages_is_logged(byte_level: Backend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Tokenizer(byte_level, {}, template(PARTS_ONLY["loop"]))
        Tokenizer(byte_level, {}, template(STRINGS_ONLY["print"]))
        assert not caplog.records
        Tokenizer(byte_level, {}, "{% for m in messages %}[{{ m.role }}]{% endfor %}")
    [record] = caplog.records
    assert "ignores or rejects user messages" in record.message
