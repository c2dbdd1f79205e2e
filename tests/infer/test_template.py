"""Chat templates: the text of transformers, and no template can hang or crash the program."""

import pytest
from chat_helpers import BEGINNING, FORGETFUL, TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from contextready.errors import ContextReadyError
from contextready.infer import template as module
from contextready.infer.template import ChatTemplate

TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " <b>Grüße</b> 漢 'quoted' "},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}
    {% endif %}
    {%- generation %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content']|trim + '<|im_end|>' + '\\n' }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt and not tools %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CONTROLS = """{%- set state = namespace(n=0) -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}
{%- set state.n = state.n + 1 -%}{{ state.n }} {{ m | tojson }} {{ [m.content, unknown] | tojson(indent=2) }}
{%- if state.n == 2 -%}{%- break -%}{%- endif -%}{%- endfor -%}{{ strftime_now('%Y') }}{{ documents is none }}"""


def render(source):
    return ChatTemplate(source, NAMED, "a-model").render(TALK)


@pytest.mark.parametrize("source", [TEMPLATE, BEGINNING, FORGETFUL, CHATML])
def test_the_text_is_that_of_transformers(source):
    (expected,), _ = render_jinja_template([TALK], chat_template=source, add_generation_prompt=True, **NAMED)
    assert render(source) == expected


def test_the_text_is_that_of_transformers_for_controls():
    source = CONTROLS.replace(", unknown]", "]")
    (expected,), _ = render_jinja_template([TALK], chat_template=source, add_generation_prompt=True, **NAMED)
    assert render(source) == expected
    assert '1 {"role": "user"' in expected


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% if %}", r"cannot be read: Expected an expression"),
        ("{{ raise_exception('only one question') }}", r"does not accept this conversation: only one question\.$"),
        ("{{ messages[9].content }}", r"does not accept this conversation: .*no element 9"),
        ("{{ messages.__class__.__mro__ }}", r"does not accept this conversation: access to attribute"),
        ("{{ messages.append(1) }}", r"does not accept this conversation: "),
        ("{% include 'secret' %}", r"does not accept this conversation: "),
        ("{{ 'a' * 10**10 }}", r"does not accept this conversation: it needs too much memory"),
        ("{{ 'a' * 10**8 }}", r"does not accept this conversation: it writes more than"),
        ("{{ range(10**9) | list }}", r"does not accept this conversation: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"(does not accept|needs too much)"),
    ],
)
def test_a_bad_template_is_one_sentence(source, sentence):
    with pytest.raises(ContextReadyError, match=rf"The chat template of a-model {sentence}") as error:
        render(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** (9 ** 9) }}"],
)
def test_a_template_that_hangs_is_ended(source, monkeypatch):
    template = ChatTemplate(source, NAMED, "a-model")
    monkeypatch.setattr(module, "SECONDS", 10)
    with pytest.raises(ContextReadyError, match=r"The chat template of a-model takes more than 10 seconds\."):
        template.render(TALK)
    assert template._process is None


def test_a_template_works_again_after_a_conversation_that_it_refused():
    template = ChatTemplate("{% if messages|length > 4 %}{{ raise_exception('too long') }}{% endif %}ok", {}, "m")
    with pytest.raises(ContextReadyError, match="too long"):
        template.render([*TALK, *TALK])
    assert template.render(TALK) == "ok"
