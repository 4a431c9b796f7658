"""OpenAI's words into the product's: the one place where a body becomes generation requests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from appliance.api.answer_form import answer_form
from appliance.api.schemas import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    ChatBody,
    CompletionBody,
    Generate,
    Message,
    TokenizeBody,
)
from appliance.api.tools import ToolPlan, text_or_calls, tool_messages, tool_plan
from appliance.api_keys.models import ApiKey
from appliance.errors import BadRequest, EngineUnavailable, ModelNotFound, NotAllowed
from appliance.serving.gateway import get_backend
from appliance.serving.types import (
    Caller,
    GenerationClass,
    GenerationRequest,
    ModelInfo,
    SamplingOptions,
)

_MAX_SEED = 2**63 - 1


def loaded_model() -> ModelInfo:
    model = get_backend().model
    if model is None:
        raise EngineUnavailable("No model is loaded yet. Try again in a moment.", retry_after_s=5)
    return model


def model_check(name: str, key: ApiKey) -> ModelInfo:
    """The loaded model, if `name` is it and the key may use it."""
    model = loaded_model()
    if name != model.name:
        raise ModelNotFound(
            f"There is no model {name[:200]!r} here. The model in use is {model.name!r}.",
            param="model",
        )
    if key.allowed_models and name not in key.allowed_models:
        raise NotAllowed(f"This API key may not use the model {name!r}.", param="model")
    return model


def chat_requests(
    body: ChatBody, key: ApiKey, *, format_param: str = "response_format"
) -> tuple[list[GenerationRequest], ToolPlan]:
    """One request a choice, and what they do with tools.

    `format_param`: what the caller's dialect calls `response_format`.
    """
    _refuse_unsupported(body)
    model = model_check(body.model, key)
    options = _options(body, max_tokens=body.max_completion_tokens or body.max_tokens)
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise BadRequest("max_completion_tokens must be at least 1.", param="max_completion_tokens")
    plan = tool_plan(
        body.tools or [],
        body.tool_choice,
        is_parallel=body.parallel_tool_calls is not False,
        tool_format=model.tool_format,
    )
    form = answer_form(body.response_format, body.structured_outputs, param=format_param)
    form = plan.form if form is None else text_or_calls(plan, form)
    continues = _continues(body, plan)
    messages = tool_messages(chat_messages(body.messages), plan)
    requests = [
        GenerationRequest(
            caller=_caller(key),
            messages=messages,
            tools=plan.template_tools,
            answer_start=plan.answer_start,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=continues,
            form=form,
            options=choice_options,
            generation_class=_generation_class(body, key),
            model=model.name,
        )
        for choice_options in _per_choice(options, _num_choices(body), _chat_logprobs(body))
    ]
    return requests, plan


def completion_requests(
    body: CompletionBody, key: ApiKey, *, default_max_tokens: int | None = 16
) -> list[GenerationRequest]:
    """One request a choice: for several prompts all choices of the first come first."""
    model = model_check(body.model, key)
    if body.suffix:
        raise BadRequest("suffix is not supported.", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest("best_of is not supported, except as the value of n.", param="best_of")
    if body.echo and body.logprobs is not None:
        raise BadRequest("echo together with logprobs is not supported.", param="echo")
    prompts = completion_prompts(body)
    if body.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("echo needs the prompt as text.", param="echo")
    num_choices = _num_choices(body)
    if len(prompts) * num_choices > MAX_CHOICES:
        raise BadRequest(
            f"{len(prompts)} prompts with n={num_choices} are too many answers at once; "
            f"at most {MAX_CHOICES} are allowed.",
            param="prompt",
        )
    max_tokens = default_max_tokens if body.max_tokens is None else body.max_tokens
    options = _options(body, max_tokens=max_tokens)
    return [
        GenerationRequest(
            caller=_caller(key),
            prompt=prompt,
            form=answer_form(None, body.structured_outputs),
            options=choice_options,
            generation_class=_generation_class(body, key),
            model=model.name,
        )
        for prompt in prompts
        for choice_options in _per_choice(
            options, num_choices, _logprobs(body.logprobs, "logprobs")
        )
    ]


def tokenize_request(body: TokenizeBody, key: ApiKey) -> GenerationRequest:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Give either prompt or messages.", param="prompt")
    model = loaded_model() if body.model is None else model_check(body.model, key)
    return GenerationRequest(
        caller=_caller(key),
        messages=None
        if body.messages is None
        else tool_messages(chat_messages(body.messages), ToolPlan(tool_format=model.tool_format)),
        prompt=body.prompt,
        model=model.name,
    )


def completion_prompts(body: CompletionBody) -> list[str | list[int]]:
    """A prompt is a text or token ids; a list of texts or of lists is several prompts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif all(isinstance(item, int) for item in prompt):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    if not prompts or not all(prompts):
        raise BadRequest("prompt is empty; give at least one letter or token.", param="prompt")
    return prompts


# ---- messages


def chat_messages(messages: list[Message]) -> list[Mapping[str, Any]]:
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Message, where: str) -> Mapping[str, Any]:
    if message.role == "tool" and not message.tool_call_id:
        raise BadRequest(
            "A message of role tool needs the tool_call_id that it answers.",
            param=f"{where}.tool_call_id",
        )
    # `developer` is the newer name of the same thing; `name` would be text that templates trust.
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": _content(message, f"{where}.content")}
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _content(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        # An assistant that called tools has nothing else to say.
        if message.role == "assistant":
            return ""
        raise BadRequest("The message has no content.", param=where)
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text"):
            raise BadRequest(
                f"Content of type {part.type[:50]!r} is not supported: the model reads text only.",
                param=where,
            )
        if part.text is None:
            raise BadRequest("A text part has no text.", param=where)
        texts.append(part.text)
    return "\n".join(texts)


# ---- options


def _refuse_unsupported(body: ChatBody) -> None:
    asked = {
        "functions": bool(body.functions),
        "function_call": body.function_call not in (None, "none", "auto"),
        "modalities": bool(body.modalities) and body.modalities != ["text"],
        "audio": body.audio is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise BadRequest(f"{name} is not supported by this server.", param=name)


def _continues(body: ChatBody, plan: ToolPlan) -> bool:
    """Whether the answer goes on with the last message."""
    if not body.continue_final_message:
        return False
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise BadRequest(
            "continue_final_message goes on with the last message, so that must be a text of the "
            f"assistant; here it is of the role {last.role}"
            + (" and calls tools." if last.tool_calls else "."),
            param="continue_final_message",
        )
    if body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message goes on with an answer that is begun, and "
            "add_generation_prompt begins another one; set one of them only.",
            param="add_generation_prompt",
        )
    if plan.answer_start:
        raise BadRequest(
            "continue_final_message goes on with a text, and tool_choice asks for a call.",
            param="tool_choice",
        )
    return True


def _options(body: Generate, *, max_tokens: int | None) -> SamplingOptions:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true.", param="stream_options")
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest(f"max_tokens is {max_tokens}; at least 1 is needed.", param="max_tokens")
    stop = body.stop
    return SamplingOptions(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        # -1 is how some clients say "off".
        top_k=0 if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens,
        ignore_eos=bool(body.ignore_eos),
    )


def _generation_class(body: Generate, key: ApiKey) -> GenerationClass:
    """A caller may only step back: the server's admins say who comes before others."""
    stands_back = body.priority is not None and body.priority > 0
    return "background" if stands_back else key.generation_class


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        # int() takes more than OpenAI does: "1_0", " 5".
        if not all(token_id.isascii() and token_id.isdigit() for token_id in bias):
            raise ValueError
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError as exc:
        raise BadRequest(
            "logit_bias must map token ids (whole numbers as text) to numbers.",
            param="logit_bias",
        ) from exc


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return _logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None


def _logprobs(number: int | None, param: str) -> int | None:
    if number is not None and not 0 <= number <= MAX_LOGPROBS:
        raise BadRequest(f"{param} is {number}; 0 to {MAX_LOGPROBS} is allowed.", param=param)
    return number


def _num_choices(body: Generate) -> int:
    num_choices = 1 if body.n is None else body.n
    if not 1 <= num_choices <= MAX_CHOICES:
        raise BadRequest(
            f"n is {num_choices}; from 1 to {MAX_CHOICES} answers are allowed.", param="n"
        )
    return num_choices


def _per_choice(
    options: SamplingOptions, num_choices: int, logprobs: int | None
) -> list[SamplingOptions]:
    """Choices of one seed differ from each other and are the same every time."""
    options = replace(options, logprobs=logprobs)
    if options.seed is None or num_choices == 1:
        return [options] * num_choices
    if options.seed + num_choices - 1 > _MAX_SEED:
        raise BadRequest(
            f"seed is {options.seed}; with n={num_choices} at most {_MAX_SEED - num_choices + 1} "
            "is allowed, as each choice takes the next.",
            param="seed",
        )
    return [replace(options, seed=options.seed + at) for at in range(num_choices)]


def _caller(key: ApiKey) -> Caller:
    return Caller(
        user_id=key.owner_id,
        username=key.owner.username,
        source=key.source,
        key_id=key.pk,
        key_prefix=key.prefix,
    )
