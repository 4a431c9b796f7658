"""Plans each step: who runs, how many tokens of each, who makes room. No torch.

There is no prefill phase, only a token budget: requests that lack one token get it first, what is
left goes to prompts in chunks (iteration-level scheduling: Orca, OSDI 2022; chunked prefill:
Sarathi-Serve, arXiv:2403.02310). Requests join and leave between any two steps.

Owner: the engine thread. Invariants: scheduled tokens never exceed the budget; a request that waits
holds no block; every request that was added ends exactly once and is then in `SchedulerNews.ended`.
"""

from collections.abc import Collection

from inference.kv_cache.manager import KVCacheManager
from inference.kv_cache.resizing import FIXED, PoolMemory, PoolResizer
from inference.outputs import ScheduledRequest, SchedulerOutput, StepOutput, TokenOutput
from inference.request import FinishReason, Request, RequestClass, RequestStatus
from inference.scheduling.admission import OverCap, Shortage, blocks_kept_free, is_capped, over_cap
from inference.scheduling.class_turns import CLASS_ORDER
from inference.scheduling.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from inference.scheduling.finish import FinishRules
from inference.scheduling.forks import HeldForks, may_share
from inference.scheduling.limits import Limits
from inference.scheduling.prompt_shares import DecodeTurns, prompt_shares
from inference.scheduling.running import (
    Preemption,
    RunningRequest,
    RunningRequests,
    SchedulerNews,
)
from inference.scheduling.settings import SchedulerSettings
from inference.scheduling.speculation import Speculation, taken_tokens
from inference.scheduling.waiting import WaitingRequests

_POOL_SHRANK = "The server's memory was made smaller than this prompt. Send a shorter one."
_TOO_LATE = "The server was too busy: the request waited past its time limit."
_INTERACTIVE_ONLY = (RequestClass.INTERACTIVE,)


class Scheduler:
    """`add`, `finish` and `apply` between steps; `schedule`, then `update_from_output`, a step."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCacheManager,
        *,
        max_len: int,
        eos_token_ids: Collection[int] = (),
        memory: PoolMemory = FIXED,
    ) -> None:
        """`max_len` bounds prompt plus output of one request; pool and setting may do further."""
        self.settings = settings
        self.kv = kv
        self.limits = Limits(max_len, kv.block_size)
        self.resizer = PoolResizer(kv, memory)
        self.waiting = WaitingRequests()
        self.running = RunningRequests()
        self.speculation = Speculation()
        # Id of the newest step that was planned; 0 before the first.
        self.step_id = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._held = HeldForks()
        # Admission numbers of live requests that started at least once.
        self._admissions: dict[str, int] = {}
        self._num_admissions = 0
        self._turns = DecodeTurns()
        self._finished_ids: list[str] = []
        self._news = SchedulerNews()
        # What the request that is next in line last lacked of memory.
        self.shortage: Shortage | None = None
        self.apply(settings, 0.0)

    # ---- between steps

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._held)

    def has_unfinished(self) -> bool:
        return bool(len(self.running) or self.num_waiting)

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; its prompt left room for at least one token when it was checked."""
        # The limit may have been lowered since it was checked; it holds for the whole request.
        request.max_len = max(self.limits.max_len, request.num_prompt_tokens + 1)
        parent = None if request.fork_of is None else self.get(request.fork_of)
        if parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens:
            self._held.hold(request)
        else:
            self.waiting.add(request, now_s)
        if request.num_prompt_tokens >= self.kv.pool.limit * self.kv.block_size:
            # The pool was made smaller between the check and now.
            self.finish(request.request_id, FinishReason.ERROR, _POOL_SHRANK, now_s)

    def get(self, request_id: str) -> Request | None:
        run = self.running.get(request_id)
        if run is not None:
            return run.request
        return self.waiting.get(request_id) or self._held.get(request_id)

    def unfinished(self) -> list[Request]:
        running = [run.request for run in self.running]
        return running + self.waiting.all() + self._held.all()

    def finish(
        self, request_id: str, reason: FinishReason, detail: str | None, now_s: float
    ) -> Request | None:
        """End a request in whatever state it is; None if it is not here (any more)."""
        run = self.running.get(request_id)
        if run is not None:
            request: Request | None = run.request
            self._stop_running(run, now_s)
        else:
            request = self.waiting.discard(request_id) or self._held.discard(request_id)
        if request is None:
            return None
        request.set_status(RequestStatus.FINISHED)
        request.finish_reason = reason
        request.finish_detail = detail
        request.finished_s = now_s
        self.kv.forget(request_id)
        self.speculation.forget(request_id)
        if self._admissions.pop(request_id, None) is not None:
            self._finished_ids.append(request_id)
            self.limits.lengths.add(request.num_tokens - request.num_cached_tokens)
            self.limits.refresh_slots(self.settings, num_blocks=self.kv.pool.num_blocks)
        self._release_held(request_id, now_s)
        self._news.ended.append(request)
        return request

    def fail_step(self, output: SchedulerOutput, detail: str, now_s: float) -> None:
        """End what a failed step was to compute, and what waits for a copy it was to make."""
        copies = {destination for _, destination in output.block_copies}
        ending = [part.request.request_id for part in output.scheduled]
        ending += [each for each, table in self.kv.tables() if not copies.isdisjoint(table)]
        for request_id in ending:
            self.finish(request_id, FinishReason.ERROR, detail, now_s)

    def apply(self, settings: SchedulerSettings, now_s: float) -> None:
        """Take new settings over; what one owner may hold bounds each new request."""
        self.settings = settings
        self.speculation.asked = settings.speculation
        self.kv.set_prefix_cache(settings.enable_prefix_cache)
        self.resizer.ask(settings.kv_memory_share)
        pool = self.kv.pool
        self.limits.apply(settings, num_blocks=pool.num_blocks, target_blocks=self.resizer.target)
        self.kv.reserve_tokens = min(settings.reserve_tokens, self.limits.hard_max_len)
        self.shortage = None
        self.waiting.set_weights(settings.owner_weights, settings.weights_of_classes)
        self.waiting.unpark_all(now_s)

    def take_news(self) -> SchedulerNews:
        news, self._news = self._news, SchedulerNews()
        return news

    # ---- a step

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """Plan the next step; None when nothing can run."""
        if self.resizer.is_due:
            self.resizer.step(self.unfinished())
            self.apply(self.settings, now_s)
        # Again after each look: whoever was held for one of them waits from then on.
        while late := self.waiting.expired(now_s):
            for request in late:
                self.finish(request.request_id, FinishReason.ERROR, _TOO_LATE, now_s)
        may_admit = self.settings.policy != "static" or not len(self.running)
        num_preempted = len(self._news.preempted)
        parts: dict[str, ScheduledRequest] = {}
        copies: list[tuple[int, int]] = []

        decodes: list[RunningRequest] = []
        prompts: list[RunningRequest] = []
        for run in self.running:
            (decodes if run.num_pending == 1 else prompts).append(run)
        budget = self.settings.max_num_batched_tokens
        turns = self._turns.of(decodes, budget, bool(prompts))
        budget -= self._place([(run, 1) for run in turns], parts, now_s)
        if may_admit and len(self._news.preempted) == num_preempted:
            prompts += self._admit(copies, now_s)
        self._place(prompt_shares(prompts, budget), parts, now_s)
        if not prompts:
            self.speculation.extend(parts, self.running, self.kv, budget)

        if not parts:
            return None
        self.step_id += 1
        finished_ids, self._finished_ids = self._finished_ids, []
        scheduled = list(parts.values())
        return SchedulerOutput(
            step_id=self.step_id,
            scheduled=scheduled,
            num_tokens=sum([part.num_new_tokens for part in scheduled]),
            block_copies=copies,
            finished_request_ids=finished_ids,
        )

    def update_from_output(
        self, output: SchedulerOutput, step_output: StepOutput, now_s: float
    ) -> list[tuple[Request, TokenOutput | None]]:
        """Take the sampled tokens in and end what is done.

        Returns:
            Each scheduled request and its new token, once for each of several, None for one whose
            prompt goes on. Those that failed are not among them.
        """
        progress: list[tuple[Request, TokenOutput | None]] = []
        self.speculation.on_step(output, step_output)
        for part in output.scheduled:
            request = part.request
            run = self.running.get(request.request_id)
            if run is None:
                continue
            accepted, sampled = taken_tokens(part, step_output)
            request.num_computed_tokens += part.num_new_tokens - len(part.draft_token_ids)
            end = None
            for token in accepted:
                request.num_computed_tokens += 1
                end = self._take_token(run, token, now_s, progress)
                if end is not None:
                    break
            if sampled is not None and sampled.error is not None and not sampled.is_refusal:
                # What it was computed from may be as bad: nobody else is to start on it.
                self.kv.distrust(request.request_id)
            elif request.num_computed_tokens % self.kv.block_size < part.num_new_tokens:
                self.kv.commit(request)
            if len(self._held) and request.num_computed_tokens >= request.num_prompt_tokens:
                self._release_held(request.request_id, now_s)
            if sampled is None:
                progress.append((request, None))
            elif end is None and sampled.error is not None:
                reason = FinishReason.REFUSED if sampled.is_refusal else FinishReason.ERROR
                end = (reason, sampled.error)
            elif end is None:
                end = self._take_token(run, sampled, now_s, progress)
            if end is not None:
                self.finish(request.request_id, *end, now_s)
        return progress

    def _take_token(
        self,
        run: RunningRequest,
        token: TokenOutput,
        now_s: float,
        progress: list[tuple[Request, TokenOutput | None]],
    ) -> tuple[FinishReason, str | None] | None:
        """Append a token to its answer; the end that it brings, if it does."""
        request = run.request
        run.account.charge(OUTPUT_TOKEN_COST)
        request.output_token_ids.append(token.token_id)
        if request.first_token_s is None:
            request.first_token_s = now_s
        progress.append((request, token))
        return run.rules.check(len(request.output_token_ids), token)

    def check_integrity(self) -> None:
        """Assert every invariant. O(everything); for tests and debugging."""
        self.kv.check_integrity(run.request for run in self.running)
        self.running.check_integrity()
        for request in self.waiting.all():
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == 0, f"{request.request_id} waits with blocks"
            assert request.request_id not in self.running, f"{request.request_id} is twice here"

    # ---- planning

    def _place(
        self,
        shares: list[tuple[RunningRequest, int]],
        parts: dict[str, ScheduledRequest],
        now_s: float,
    ) -> int:
        """Find blocks for these tokens, preempting where none are left; returns tokens placed."""
        before = sum([part.num_new_tokens for part in parts.values()])
        for run, wanted in shares:
            request = run.request
            start = request.num_computed_tokens
            while request.status is RequestStatus.RUNNING:
                num_new = wanted
                table = self.kv.table(request.request_id)
                if start + num_new > len(table) * self.kv.block_size:
                    # A part of a prompt chunk is better than a preemption.
                    num_new = min(num_new, self.kv.room_for(request.request_id) - start)
                    wanted_tokens = start + max(1, num_new)
                    over = over_cap(run, wanted_tokens, self.running, self.kv, self.settings)
                    if over is not None or num_new < 1:
                        parts.pop(self._make_room(over, now_s), None)
                        continue
                    self.kv.allocate_slots(request, start + num_new)
                parts[request.request_id] = ScheduledRequest(
                    request, start, num_new, table.copy(), samples=num_new == run.num_pending
                )
                break
        return sum([part.num_new_tokens for part in parts.values()]) - before

    def _make_room(self, over: OverCap | None, now_s: float) -> str:
        """Preempt for a cap, or else for the pool; returns whom."""
        if over is not None:
            return self._preempt(over.victim, "max_blocks_per_owner", over.num_needed, now_s)
        # One slot less, and it would not have started.
        fitting = max(1, len(self.running) - 1)
        return self._preempt(self.running.victim(), "slots", fitting, now_s)

    def _preempt(self, run: RunningRequest, setting: str, value: int, now_s: float) -> str:
        request = run.request
        self._stop_running(run, now_s)
        num_lost, request.num_computed_tokens = request.num_computed_tokens, 0
        num_blocks = self.kv.release(request.request_id)
        request.num_preemptions += 1
        request.set_status(RequestStatus.PREEMPTED)
        self.waiting.put_back(request, run.admission, now_s)
        self._news.preempted.append(Preemption(request, num_lost, num_blocks, setting, value))
        return request.request_id

    def _stop_running(self, run: RunningRequest, now_s: float) -> None:
        self.running.remove(run)
        self.waiting.unpark(run.request.owner, now_s)

    # ---- admission

    def _admit(self, copies: list[tuple[int, int]], now_s: float) -> list[RunningRequest]:
        """Start waiting requests while slots and memory last; adds block copies to make."""
        admitted: list[RunningRequest] = []
        while len(self.running) < self.limits.max_running:
            is_open = self.running.num_not_interactive < self.limits.max_not_interactive
            classes = CLASS_ORDER if is_open else _INTERACTIVE_ONLY
            request = self.waiting.peek(now_s, self.settings.aging_s, classes)
            if request is None:
                break
            if is_capped(request, self.running, self.kv, self.settings):
                self.waiting.park(request.owner)
                continue
            run = self._start(request, copies, now_s)
            if run is None:
                # Smaller ones behind it must wait, or a large one would never find room.
                break
            admitted.append(run)
        return admitted

    def _start(
        self, request: Request, copies: list[tuple[int, int]], now_s: float
    ) -> RunningRequest | None:
        """Start one request if memory allows."""
        available = self.kv.pool.num_available
        short = self.shortage
        if short is not None and short.still_holds(request, available, len(self.running)):
            return None
        parent = self._fork_parent(request)
        prefix = [] if parent is not None else self.kv.find_prefix(request)
        num_shared = len(prefix)
        if parent is not None:
            num_shared = (request.num_prompt_tokens - 1) // self.kv.block_size
        needed = self.kv.blocks_for(request.num_tokens) - num_shared
        needed += self.kv.num_unreferenced(prefix)
        kept_free = blocks_kept_free(request, self.running, self.kv, self.settings)
        if len(self.running) and needed + kept_free > available:
            num_running = len(self.running)
            self.shortage = Shortage(request, needed, kept_free, available, num_running)
            return None
        self.shortage = None
        if parent is not None:
            copies.append(self.kv.fork(parent, request))
        else:
            self.kv.count_hit(request, prefix)
            self.kv.start(request, prefix)
        if self.kv.reserve_tokens:
            self.kv.allocate_slots(request, request.num_tokens)
        return self._take_in(request, now_s)

    def _take_in(self, request: Request, now_s: float) -> RunningRequest:
        num_uncached = request.num_prompt_tokens - request.num_computed_tokens
        account = self.waiting.start(request, PROMPT_TOKEN_COST * num_uncached, now_s)
        request.set_status(RequestStatus.RUNNING)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = request.num_computed_tokens
            self._admissions[request.request_id] = self._num_admissions
            self._num_admissions += 1
            self._news.started.append(request)
        rules = FinishRules.of(request, self._eos_token_ids, request.max_len)
        return self.running.add(request, account, rules, self._admissions[request.request_id])

    def _fork_parent(self, request: Request) -> Request | None:
        """The running request whose prompt blocks this one can start on."""
        if request.fork_of is None or request.status is RequestStatus.PREEMPTED:
            return None
        run = self.running.get(request.fork_of)
        is_usable = run is not None and may_share(run.request, request)
        return run.request if run is not None and is_usable else None

    def _release_held(self, parent_id: str, now_s: float) -> None:
        for request in self._held.release(parent_id):
            self.waiting.add(request, now_s)
