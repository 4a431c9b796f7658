"""Forks: requests that wait for another one's prompt, in order to share its blocks. No torch."""

from inference.request import Request


class HeldForks:
    """Requests held back by the id of the one they fork from. Every call is O(1)."""

    def __init__(self) -> None:
        self._by_parent: dict[str, dict[str, Request]] = {}
        self._parent_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._parent_of)

    def hold(self, request: Request) -> None:
        assert request.fork_of is not None, f"{request.request_id} is no fork"
        self._by_parent.setdefault(request.fork_of, {})[request.request_id] = request
        self._parent_of[request.request_id] = request.fork_of

    def get(self, request_id: str) -> Request | None:
        parent_id = self._parent_of.get(request_id)
        return None if parent_id is None else self._by_parent[parent_id][request_id]

    def discard(self, request_id: str) -> Request | None:
        parent_id = self._parent_of.pop(request_id, None)
        if parent_id is None:
            return None
        siblings = self._by_parent[parent_id]
        request = siblings.pop(request_id)
        if not siblings:
            del self._by_parent[parent_id]
        return request

    def release(self, parent_id: str) -> list[Request]:
        """Let go of all that wait for this one, in order of arrival."""
        released = list(self._by_parent.pop(parent_id, {}).values())
        for request in released:
            del self._parent_of[request.request_id]
        return released

    def all(self) -> list[Request]:
        return [request for held in self._by_parent.values() for request in held.values()]


def may_share(parent: Request, child: Request) -> bool:
    """Whether the parent's blocks may become the child's, and are there.

    A caller cannot reach into another scope by naming one of its requests.
    """
    return (
        parent.num_computed_tokens >= parent.num_prompt_tokens
        and parent.cache_scope == child.cache_scope
        and parent.prompt_token_ids == child.prompt_token_ids
    )
