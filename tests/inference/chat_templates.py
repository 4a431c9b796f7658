"""Templates of the kinds that models have, and a conversation for them."""

import json
from pathlib import Path

from inference.text.chat_template import ChatTemplate
from inference.text.tokenizer import Tokenizer
from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.text_models import (
    byte_level_metadata,
    make_tokenizer,
)

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'You are helpful.' %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

STRICT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' ~ message['content'] | trim ~ eos_token }}
{% endif %}{% endfor %}"""

TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = message['role'] %}
{% if role == 'assistant' %}{% set role = 'model' %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

PLAIN_TAGS = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}<|assistant|>
"""

THINKING = """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""

TOOLS = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}
{{- tool | tojson }}{{ '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}
{%- if message.name %}{{ ' ' + message.name }}{% endif %}{{ '\n' }}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson ~ '}' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"""

CONVERSATION = [
    {"role": "user", "content": "  Hello, <b>he</b> said:\n\n1. ä 世 😀\n"},
    {"role": "assistant", "content": "A reply.\n\nWith two parts"},
    {"role": "user", "content": "> a quote? [1] <none>"},
]
SYSTEM = [{"role": "system", "content": " Be short. "}]


def chatml_folder(folder: Path) -> Path:
    """A model folder with a byte-level tokenizer and the template CHATML, and no weights."""
    document, config = build_tokenizer(byte_level_metadata())
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def byte_level(bos: str | None = None, template: str = "") -> Tokenizer:
    return make_tokenizer(byte_level_metadata(bos=bos), template)


def template_of(source: str, bos: str | None = None) -> ChatTemplate:
    return ChatTemplate(source, byte_level(bos, source))
