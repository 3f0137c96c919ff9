"""Chat templates against transformers' apply_chat_template, and what the sandbox keeps out."""

import time

import pytest
import tokenizers
import transformers
from tokenizers import models

from workerkit.components.engine.chat_template import JinjaChatTemplate
from workerkit.framework.errors import RequestError, UnsupportedError

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
BLOCKS = """{%- set ns = namespace(count=0) %}
    {% for message in messages %}
        {%- if message.role == "skip" %}{% continue %}{% endif %}
        {% set ns.count = ns.count + 1 %}
{{ ns.count }}: {{ message | tojson }} {{ message.content | trim | upper }}
        {% generation %}{{ message.role }}{% endgeneration %}
    {% endfor %}
{%- if tools %}tools{% endif %}{% if documents is none %} none{% endif %}
{{ strftime_now("%Y") }}
"""
CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": " Grüße, 漢字 "},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "And?"},
]


class Source:
    """As much of a tokenizer as a template needs."""

    bos_token, eos_token = "<s>", "</s>"

    def __init__(self, chat_template):
        self.chat_template = chat_template


def render(template, messages=CHAT, **options):
    return JinjaChatTemplate(Source(template)).render(messages, **options)


@pytest.mark.parametrize("template", [SMOLLM, LLAMA2, BLOCKS])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2], [*CHAT[:3], {"role": "user", "content": ""}]])
@pytest.mark.parametrize("generation", [True, False])
def test_equal_to_transformers(template, messages, generation):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    expected = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=generation
    )
    assert render(template, messages, add_generation_prompt=generation) == expected


def test_one_part_renders_many_times():
    part = JinjaChatTemplate(Source(SMOLLM))
    assert part.render(CHAT) == part.render(CHAT)
    assert part.render(CHAT[:1]).endswith("<|im_start|>assistant\n")


def test_the_templates_own_refusal_is_the_requests_error():
    with pytest.raises(RequestError, match="refuses these messages: Conversation roles must alternate"):
        render(LLAMA2, [CHAT[1], CHAT[1]])


def test_a_template_that_fails_on_the_messages():
    with pytest.raises(RequestError, match="fails on these messages: UndefinedError"):
        render("{{ messages[7].content }}")
    with pytest.raises(RequestError, match="fails on these messages: RecursionError"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_no_template_and_a_broken_one():
    with pytest.raises(UnsupportedError, match="has no chat template"):
        render(None)
    with pytest.raises(UnsupportedError, match="not valid: line 2"):
        render("x\n{% if %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_keeps_pythons_internals_out(template):
    with pytest.raises(UnsupportedError, match="sandbox forbids"):
        render(template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loops more than"),
        (
            "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{{ b }}{% endfor %}{% endfor %}",
            "loops more than",
        ),
        ("{% set x = 'x' * 99999 %}{% for a in range(9999) %}{{ x }}{% endfor %}", "writes more than"),
        ("{{ 'x' * 10**9 }}", "of this size"),
        ("{{ [0] * 999999999 }}", "of this size"),
        ("{{ 10 ** 999999999 }}", "of this size"),
    ],
)
def test_a_template_cannot_keep_the_engine_busy(template, message):
    start = time.monotonic()
    with pytest.raises(UnsupportedError, match=message):
        render(template)
    assert time.monotonic() - start < 20


def test_a_range_that_is_too_long_is_refused():
    with pytest.raises(RequestError, match="Range too big"):
        render("{% for a in range(10**9) %}{% endfor %}")


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": "x", "parts": [{"a": 1}]}]
    render("{{ messages[0].parts[0].a }}", messages)
    assert messages == [{"role": "user", "content": "x", "parts": [{"a": 1}]}]


@pytest.mark.parametrize(
    "message", ["Hi", {"content": "x"}, {"role": 3}, {"role": "user", "content": object()}, {"role": "user", "x": {1}}]
)
def test_messages_that_are_none(message):
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        render(SMOLLM, [CHAT[0], message])
