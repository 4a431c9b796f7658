"""What a request must satisfy before it is queued. Any thread; no torch."""

from inference.errors import InvalidPrompt, PromptTooLong
from inference.outputs import RunnerInfo
from inference.request import Request, RequestStatus


def check_request(request: Request, info: RunnerInfo, max_len: int) -> None:
    """Refuse what could never be served. `max_len` bounds prompt plus answer.

    Raises:
        InvalidPrompt: no tokens, or an id that the model does not have.
        PromptTooLong: with the numbers; no room is left for one new token.
        InvalidSamplingParams: a parameter is out of its range.
    """
    assert request.status is RequestStatus.WAITING, f"{request.request_id} was used before"
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidPrompt("The prompt is empty; it needs at least one token.", param="messages")
    if len(prompt) >= max_len:
        raise prompt_too_long(len(prompt), info, max_len)
    least, most = min(prompt), max(prompt)
    if least < 0 or most >= info.vocab_size:
        raise InvalidPrompt(
            f"The prompt holds the token id {least if least < 0 else most}; "
            f"ids from 0 to {info.vocab_size - 1} are allowed.",
            param="prompt",
        )
    request.params.validate(vocab_size=info.vocab_size)


def prompt_too_long(
    num_tokens: int, info: RunnerInfo, max_len: int, *, at_least: bool = False
) -> PromptTooLong:
    """The refusal that names what is too small. `at_least`: no more than these were counted."""
    pool_len = info.num_blocks * info.block_size
    what = "model's context"
    if max_len == pool_len < info.max_model_len:
        what = "server's memory for one conversation"
    elif max_len < min(pool_len, info.max_model_len):
        what = "server's context limit"
    return PromptTooLong(num_tokens, max_len - 1, what, at_least=at_least)
