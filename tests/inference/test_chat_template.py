"""Chat templates: the ids that transformers gives, and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from inference.errors import InvalidPrompt
from inference.text.chat_template import ChatTemplate
from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.chat_templates import (
    CHATML,
    CONVERSATION,
    HEADERS,
    PLAIN_TAGS,
    STRICT,
    SYSTEM,
    THINKING,
    TOOLS,
    TURNS,
    byte_level,
    template_of,
)
from tests.inference.text_models import (
    byte_level_metadata,
    make_tokenizer,
    sentencepiece_metadata,
)


def as_transformers(
    metadata: dict[str, Any], source: str, messages: list[Any], folder: Path, **options: Any
) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    document, config = build_tokenizer(metadata)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = source
    return theirs.apply_chat_template(  # type: ignore[no-any-return]
        messages, return_dict=False, **{"add_generation_prompt": True, **options}
    )


@pytest.mark.parametrize(
    ("metadata", "source", "messages"),
    [
        (byte_level_metadata(), CHATML, SYSTEM + CONVERSATION),
        (byte_level_metadata(), CHATML, CONVERSATION),
        (byte_level_metadata("<|begin_of_text|>"), HEADERS, SYSTEM + CONVERSATION),
        (byte_level_metadata("<|begin_of_text|>"), HEADERS, CONVERSATION),
        (byte_level_metadata("<s>"), STRICT, CONVERSATION),
        (byte_level_metadata("<s>"), TURNS, CONVERSATION),
        (byte_level_metadata(), PLAIN_TAGS, SYSTEM + CONVERSATION),
        (byte_level_metadata(), THINKING, CONVERSATION),
        (sentencepiece_metadata(), STRICT, CONVERSATION),
    ],
)
def test_ids_are_those_of_transformers(
    metadata: dict[str, Any], source: str, messages: list[Any], tmp_path: Path
) -> None:
    expected = as_transformers(metadata, source, messages, tmp_path)
    template = ChatTemplate(source, make_tokenizer(metadata, source))
    assert template.encode(messages).token_ids == expected


def test_tools_and_options_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "It's <b>ä</b>", "parameters": {"a": [1]}},
    }
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"a": 1}}}
    messages = [
        CONVERSATION[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "name": "weather"},
    ]
    expected = as_transformers(byte_level_metadata(), TOOLS, messages, tmp_path, tools=[tool])
    template = template_of(TOOLS)
    assert template.encode(messages, tools=[tool]).token_ids == expected
    as_text = {**call, "function": {"name": "weather", "arguments": '{"a": 1}'}}
    sent = [
        messages[0],
        {"role": "assistant", "content": None, "tool_calls": [as_text]},
        messages[2],
    ]
    assert template.encode(sent, tools=[tool]).token_ids == expected
    assert "None" not in template._tokenizer.decode(expected)

    expected = as_transformers(
        byte_level_metadata(), THINKING, CONVERSATION, tmp_path, enable_thinking=False
    )
    thinking = template_of(THINKING)
    options = {"enable_thinking": False}
    assert thinking.encode(CONVERSATION, options=options).token_ids == expected


@pytest.mark.parametrize(
    ("source", "bos"),
    [
        (CHATML, None),
        (HEADERS, "<|begin_of_text|>"),
        (STRICT, "<s>"),
        (TURNS, "<s>"),
        (PLAIN_TAGS, None),
        (THINKING, None),
    ],
)
@pytest.mark.parametrize("begun", ["The capital is", "x", "ends in <|im_", "Hello, <b>he</b> said"])
def test_the_last_message_is_continued_as_transformers_does(
    source: str, bos: str | None, begun: str, tmp_path: Path
) -> None:
    messages = [CONVERSATION[0], {"role": "assistant", "content": begun}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    expected = as_transformers(byte_level_metadata(bos), source, messages, tmp_path, **options)
    rendered = template_of(source, bos).encode(messages, continue_final_message=True)
    assert rendered.token_ids == expected


def test_an_answer_that_is_begun_keeps_its_last_blanks_and_may_be_empty() -> None:
    template = template_of(CHATML)

    def text(begun: str) -> str:
        messages = [CONVERSATION[0], {"role": "assistant", "content": begun}]
        rendered = template.encode(messages, continue_final_message=True)
        return template._tokenizer.decode(rendered.token_ids, show_special=True)

    assert text("1. \n").endswith("<|im_start|>assistant\n1. \n")
    assert text("").endswith("<|im_start|>assistant\n")


def test_the_beginning_of_an_answer_can_be_left_out() -> None:
    template = template_of(CHATML)
    whole = template.encode(CONVERSATION).token_ids
    short = template.encode(CONVERSATION, add_generation_prompt=False).token_ids
    assert whole[: len(short)] == short
    assert template._tokenizer.decode(whole[len(short) :], show_special=True) == (
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}],
        },
    ],
)
def test_only_a_text_of_the_assistant_is_continued(last: dict[str, Any]) -> None:
    with pytest.raises(InvalidPrompt, match="assistant") as refused:
        template_of(CHATML).encode([CONVERSATION[0], last], continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_a_template_that_leaves_the_last_message_out_says_so() -> None:
    silent = "{% for message in messages[:1] %}{{ message.content }}{% endfor %}"
    with pytest.raises(InvalidPrompt, match="cannot be continued"):
        template_of(silent).encode(CONVERSATION[:2], continue_final_message=True)


def test_a_template_may_still_ask_what_a_message_holds() -> None:
    template = template_of(THINKING)
    with_thought = [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nAnswer"}]
    without = [{"role": "assistant", "content": "Answer"}]
    assert template.encode(with_thought).token_ids == template.encode(without).token_ids


# ---- A12, A20, B06 -------------------------------------------------------------------------------


def test_a12_no_messages_are_refused_and_empty_ones_are_rendered() -> None:
    template = template_of(CHATML)
    with pytest.raises(InvalidPrompt, match="no messages"):
        template.encode([])
    for content in ("", " ", None, []):
        assert template.encode([{"role": "user", "content": content}]).token_ids


@pytest.mark.parametrize(
    "content",
    [5, {}, [{"type": "image_url", "image_url": {"url": "x"}}], ["x"], [{"type": "text"}]],
)
def test_content_that_is_no_text_is_refused(content: Any) -> None:
    with pytest.raises(InvalidPrompt, match=r"messages\[0\]"):
        template_of(CHATML).encode([{"role": "user", "content": content}])


@pytest.mark.parametrize("source", [HEADERS, "{{ bos_token }}" + HEADERS, CHATML])
def test_a20_exactly_one_bos_whether_or_not_the_template_writes_it(source: str) -> None:
    template = template_of(source, bos="<|begin_of_text|>")
    bos_id = template._tokenizer.markers["<|begin_of_text|>"].token_id
    token_ids = template.encode(CONVERSATION).token_ids
    assert token_ids[0] == bos_id
    assert token_ids.count(bos_id) == 1


@pytest.mark.parametrize(
    ("source", "messages", "says"),
    [
        (STRICT, [CONVERSATION[0], CONVERSATION[0]], "roles must alternate"),
        (STRICT, [CONVERSATION[1]], "roles must alternate"),
        (STRICT, SYSTEM, "roles must alternate"),
        (TURNS, SYSTEM + CONVERSATION, "System role not supported"),
        (STRICT, [*CONVERSATION[:2], SYSTEM[0]], "roles must alternate"),
    ],
)
def test_b06_a_refusal_carries_the_templates_short_message_only(
    source: str, messages: list[Any], says: str
) -> None:
    template = template_of(source)
    with pytest.raises(InvalidPrompt) as caught:
        template.encode(messages)
    text = str(caught.value)
    assert says in text
    assert "{%" not in text
    assert "raise_exception" not in text
    assert len(text) < 300
    # The next request is fine.
    assert template.encode(CONVERSATION).token_ids


def test_b06_long_conversations_and_broken_templates() -> None:
    assert template_of(CHATML).encode(CONVERSATION * 100).token_ids
    template = template_of("{{ messages[0].content }}{{ messages[7].content.x.y }}")
    with pytest.raises(InvalidPrompt, match="cannot render these messages"):
        template.encode(CONVERSATION)
    template = template_of("{{ raise_exception('x' * 5000) }}")
    with pytest.raises(InvalidPrompt) as caught:
        template.encode(CONVERSATION)
    assert len(str(caught.value)) < 300


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    template = ChatTemplate.from_dir(tmp_path, byte_level())
    assert not template.exists
    with pytest.raises(InvalidPrompt, match="no chat template"):
        template.encode(CONVERSATION)


# ---- the server's own prompt ---------------------------------------------------------------------


def test_the_servers_prompt_is_counted_as_public_prefix() -> None:
    template = template_of(CHATML)
    decode = template._tokenizer.decode
    prompt = template.encode(CONVERSATION[:1], server_prompt="Be kind.")
    public = prompt.token_ids[: prompt.num_public_prefix_tokens]
    assert decode(public).startswith("system\nBe kind.\nuser\n")
    own = template.encode(SYSTEM + CONVERSATION, server_prompt="Be kind.")
    assert decode(own.token_ids).startswith("system\nBe kind.\n\n Be short. \nuser\n")
    shared = decode(own.token_ids[: own.num_public_prefix_tokens])
    assert shared.startswith("system\nBe kind.")
    assert "Be short" not in shared


@pytest.mark.parametrize(
    "refuses",
    ["{{ raise_exception('System role not supported') }}", "", "{% set messages = messages[1:] %}"],
)
def test_a_template_without_system_messages_gets_the_servers_prompt_in_the_first_turn(
    refuses: str,
) -> None:
    """Also one that leaves them out without a word."""
    template = template_of(
        "{% if messages[0].role == 'system' %}" + refuses + "{% endif %}"
        "{% for m in messages if m.role != 'system' %}"
        "{{ m.role ~ ': ' ~ m.content ~ '.' }}{% endfor %}"
    )
    decode = template._tokenizer.decode
    for text in ("hello", "a secret"):
        prompt = template.encode([{"role": "user", "content": text}], server_prompt="Be kind.")
        assert decode(prompt.token_ids) == f"user: Be kind.\n\n{text}."
        public = decode(prompt.token_ids[: prompt.num_public_prefix_tokens])
        assert public == "user: Be kind.\n\n"
    longer = template.encode(CONVERSATION, server_prompt="Be kind.")
    assert decode(longer.token_ids).count("Be kind.") == 1


def test_no_part_of_a_users_text_is_public() -> None:
    template = template_of(CHATML)
    for content in ("a", "a secret", "0", "hello"):
        prompt = template.encode([{"role": "user", "content": content}])
        public = template._tokenizer.decode(prompt.token_ids[: prompt.num_public_prefix_tokens])
        assert public == "user\n"


async def test_threads_share_a_template() -> None:
    template = template_of(THINKING)
    expected = template.encode(CONVERSATION).token_ids
    prompts = await asyncio.gather(
        *(asyncio.to_thread(template.encode, CONVERSATION) for _ in range(20))
    )
    assert all(prompt.token_ids == expected for prompt in prompts)
