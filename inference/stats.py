"""Pictures of the engine for observers, built by the engine thread between steps. No torch."""

from collections.abc import Mapping

from inference.metrics import Metrics
from inference.outputs import BlockMap, EngineStats, KVStats, PrefixStats, RequestInfo, Setting
from inference.request import Request, RequestStatus
from inference.scheduler import Scheduler
from inference.scheduling.limits import effective_class_weights
from inference.scheduling.running import RunningRequest
from inference.scheduling.waits import Wait, waits

FREE = -1
CACHED = -2
# Waiting requests shown, however many there are.
MAX_SHOWN_WAITING = 50
MAX_SHOWN_PREFIXES = 10
NO_BLOCKS = BlockMap(0, (), (), {}, {})


def loading_stats(state: str, progress: tuple[float, str], error: str | None) -> EngineStats:
    """The picture while there is no scheduler."""
    nothing = {"p50": None, "p95": None}
    return EngineStats(
        state=state,
        progress=progress,
        error=error,
        step_id=0,
        last_step_s=0.0,
        slots=Setting(0, 0, "the model is not loaded"),
        settings={},
        num_running=0,
        num_waiting=0,
        kv=KVStats(0, 0, 0, 0, 0, 0, 0, 0),
        prefill_tokens_per_s=0.0,
        decode_tokens_per_s=0.0,
        cache_hit_rate=None,
        ttft_s=nothing,
        itl_s=nothing,
        step_host_ms=0.0,
        step_forward_ms=0.0,
        totals={},
        requests=(),
    )


def engine_stats(
    scheduler: Scheduler,
    metrics: Metrics,
    *,
    state: str,
    error: str | None,
    bytes_per_block: int,
    last_step_s: float,
    now_s: float,
) -> EngineStats:
    """O(running + shown waiting), whatever the queue's length."""
    prefill_rate, decode_rate = metrics.rates(now_s)
    ttft_s, itl_s = metrics.times(now_s)
    return EngineStats(
        state=state,
        progress=(1.0, ""),
        error=error,
        step_id=scheduler.step_id,
        last_step_s=last_step_s,
        slots=scheduler.limits.slots,
        settings=_settings(scheduler),
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        kv=_kv_stats(scheduler, bytes_per_block),
        prefill_tokens_per_s=prefill_rate,
        decode_tokens_per_s=decode_rate,
        cache_hit_rate=metrics.cache_hit_rate(now_s),
        ttft_s=ttft_s,
        itl_s=itl_s,
        step_host_ms=metrics.step_host_ms,
        step_forward_ms=metrics.step_forward_ms,
        totals=dict(metrics.totals),
        requests=_requests(scheduler, now_s),
        prefixes=[
            PrefixStats(each.num_tokens, each.num_hits, each.scope)
            for each in scheduler.kv.hits.top(MAX_SHOWN_PREFIXES)
        ],
    )


def _settings(scheduler: Scheduler) -> Mapping[str, Setting]:
    asked = scheduler.settings
    names = (
        "max_num_batched_tokens",
        "max_waiting_requests",
        "max_waiting_tokens",
        "enable_prefix_cache",
        "policy",
        "max_running_per_owner",
        "max_blocks_per_owner",
        "admission_headroom",
        "aging_s",
        "reserve_tokens",
    )
    shown = {name: Setting(getattr(asked, name), getattr(asked, name)) for name in names}
    if scheduler.kv.reserve_tokens != asked.reserve_tokens:
        reason = "no request can be longer"
        shown["reserve_tokens"] = Setting(asked.reserve_tokens, scheduler.kv.reserve_tokens, reason)
    return {
        "slots": scheduler.limits.slots,
        "max_model_len": scheduler.limits.context,
        "speculation": scheduler.speculation.setting,
        "kv_memory_share": scheduler.resizer.setting(),
        "reserved_interactive_slots": scheduler.limits.reserved,
        "class_weights": effective_class_weights(asked.class_weights),
        **shown,
    }


def _kv_stats(scheduler: Scheduler, bytes_per_block: int) -> KVStats:
    kv, pool = scheduler.kv, scheduler.kv.pool
    wasted = sum(
        kv.num_blocks_of(run.request.request_id) * kv.block_size - run.request.num_computed_tokens
        for run in scheduler.running
    )
    return KVStats(
        block_size=kv.block_size,
        bytes_per_block=bytes_per_block,
        blocks_total=pool.num_blocks,
        blocks_used=pool.num_used,
        blocks_cached=pool.num_cached,
        blocks_free=pool.num_free,
        blocks_shared=pool.num_shared,
        slots_wasted=wasted,
    )


def _requests(scheduler: Scheduler, now_s: float) -> tuple[RequestInfo, ...]:
    running = [_request_info(run.request, scheduler, now_s, run=run) for run in scheduler.running]
    line = scheduler.waiting.order(MAX_SHOWN_WAITING)
    waiting = [
        _request_info(request, scheduler, now_s, position=position, wait=wait)
        for position, (request, wait) in enumerate(zip(line, waits(scheduler, line), strict=True))
    ]
    return tuple(running + waiting)


def _request_info(
    request: Request,
    scheduler: Scheduler,
    now_s: float,
    *,
    run: RunningRequest | None = None,
    position: int | None = None,
    wait: Wait | None = None,
) -> RequestInfo:
    blocks = () if run is None else scheduler.kv.table(request.request_id)
    pool = scheduler.kv.pool.blocks
    talking_s = None if request.first_token_s is None else now_s - request.first_token_s
    num_output = len(request.output_token_ids)
    return RequestInfo(
        request_id=request.request_id,
        owner=request.owner,
        labels=request.labels,
        request_class=request.request_class.value,
        state=_state(request),
        slot=None if run is None else run.slot,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=num_output,
        num_blocks=len(blocks),
        num_own_blocks=sum([pool[block_id].ref_cnt == 1 for block_id in blocks]),
        queue_position=position,
        age_s=now_s - request.arrival_s,
        ttft_s=None if talking_s is None else now_s - request.arrival_s - talking_s,
        tokens_per_s=num_output / talking_s if talking_s else None,
        num_preemptions=request.num_preemptions,
        wait=wait,
    )


def _state(request: Request) -> str:
    if request.status is not RequestStatus.RUNNING:
        return request.status.value
    return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"


def block_map(scheduler: Scheduler) -> BlockMap:
    """Every block's state. O(blocks)."""
    kv = scheduler.kv
    cells = [FREE] * kv.pool.num_ids
    for block_id in kv.pool.cached_ids():
        cells[block_id] = CACHED
    holders_of: dict[int, tuple[str, ...]] = {}
    partial: dict[int, int] = {}
    token_start: dict[int, int] = {}
    for run in scheduler.running:
        request_id, num_computed = run.request.request_id, run.request.num_computed_tokens
        for index, block_id in enumerate(kv.table(request_id)):
            start = index * kv.block_size
            holders_of[block_id] = (*holders_of.get(block_id, ()), request_id)
            token_start[block_id] = start
            if num_computed < start + kv.block_size:
                partial[block_id] = max(0, num_computed - start)
    index_of: dict[tuple[str, ...], int] = {}
    for block_id, holders in holders_of.items():
        cells[block_id] = index_of.setdefault(holders, len(index_of))
    return BlockMap(scheduler.step_id, cells, tuple(index_of), partial, token_start)
