"""The hand-over from the engine thread to consumers."""

import asyncio
import threading

import pytest

from inference.outputs import TokenLogprobs
from inference.request import FinishReason
from inference.streams import RequestStream, deliver_batch


def make_stream(request_id="r", closed=None):
    return RequestStream(request_id, (closed if closed is not None else []).append)


def test_tokens_that_were_not_read_yet_come_merged_in_one_update():
    stream = make_stream()
    stream.add_progress(4, 2)
    for token_id in (5, 6, 7):
        stream.add_token(token_id, TokenLogprobs(-0.1))
    update = stream.get(0)
    assert update.token_ids == [5, 6, 7]
    assert len(update.logprobs) == 3
    assert (update.num_computed_prompt_tokens, update.num_cached_tokens) == (4, 2)
    assert update.finish_reason is None


def test_only_the_newest_queue_position_is_seen_and_it_goes_once_running():
    stream = make_stream()
    stream.add_queue_position(9, 3.0)
    stream.add_queue_position(8, 2.5)
    update = stream.get(0)
    assert (update.queue_position, update.estimated_wait_s) == (8, 2.5)
    stream.add_progress(4, 0)
    assert stream.get(0).queue_position is None


def test_a_place_in_line_is_over_with_the_next_token():
    """Of an answer that was preempted and goes on: no progress of a prompt comes before it."""
    stream = make_stream()
    stream.add_token(5, None)
    stream.add_queue_position(2, 1.0)
    assert stream.get(0).queue_position == 2
    stream.add_token(6, None)
    update = stream.get(0)
    assert (update.queue_position, update.estimated_wait_s) == (None, None)


def test_the_last_update_has_the_end_and_nothing_follows():
    stream = make_stream()
    stream.add_token(5, None)
    stream.end(FinishReason.STOP, "x")
    stream.end(FinishReason.ERROR, "second end")
    stream.add_token(6, None)
    update = stream.get(0)
    assert (update.token_ids, update.finish_reason, update.finish_detail) == (
        [5],
        FinishReason.STOP,
        "x",
    )
    assert stream.get(0) is None


def test_a_blocking_read_times_out():
    with pytest.raises(TimeoutError):
        make_stream().get(0.0)


def test_a_blocking_read_is_woken_from_another_thread():
    stream = make_stream()

    def produce():
        stream.add_token(5, None)
        deliver_batch([stream])

    threading.Timer(0.01, produce).start()
    assert stream.get(10).token_ids == [5]


def test_closing_early_aborts_once_and_drops_what_comes():
    closed = []
    stream = make_stream("r1", closed)
    stream.add_token(5, None)
    stream.close()
    stream.close()
    stream.add_token(6, None)
    assert closed == ["r1"]
    assert stream.get(0) is None


def test_closing_after_the_end_aborts_nothing():
    closed = []
    stream = make_stream("r1", closed)
    stream.end(FinishReason.STOP, None)
    stream.close()
    assert closed == []


async def test_an_async_reader_gets_every_token_once_and_ends():
    """A28: the iterator ends right after the finish."""
    stream = make_stream()

    def produce():
        for token_id in range(200):
            stream.add_token(token_id, None)
            deliver_batch([stream])
        stream.end(FinishReason.LENGTH, None)
        deliver_batch([stream])

    thread = threading.Thread(target=produce)
    thread.start()
    read, ends = [], []
    async for update in stream:
        read += update.token_ids
        if update.finish_reason is not None:
            ends.append(update.finish_reason)
    thread.join()
    assert read == list(range(200))
    assert ends == [FinishReason.LENGTH]


async def test_an_end_that_comes_just_after_the_reader_looked_is_not_lost():
    """A28: the engine's thread ends the stream between the reader's look and its wait."""
    stream = make_stream()
    look = stream.take

    def look_and_end():
        found = look()
        stream.end(FinishReason.STOP, None)
        deliver_batch([stream])
        return found

    stream.take = look_and_end
    async with asyncio.timeout(10):
        assert (await anext(stream)).finish_reason is FinishReason.STOP
    assert await anext(stream, "ended") == "ended"


async def test_a_loop_is_woken_once_for_all_streams_of_a_step():
    streams = [make_stream(str(n)) for n in range(5)]
    calls = []
    loop = asyncio.get_running_loop()
    original = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: (calls.append(1), original(*args))
    try:
        for stream in streams:
            stream.add_token(1, None)
        deliver_batch(streams)
        assert len(calls) == 1
        # The loop did not run yet: nothing piles up in it.
        for stream in streams:
            stream.add_token(2, None)
        deliver_batch(streams)
        assert len(calls) == 1
        await asyncio.sleep(0)
        for stream in streams:
            stream.add_token(3, None)
        deliver_batch(streams)
        assert len(calls) == 2
    finally:
        del loop.call_soon_threadsafe
    assert (await anext(streams[0])).token_ids == [1, 2, 3]


async def test_a_reader_that_stops_reading_does_not_hold_up_the_others():
    """A28: one of two readers never reads."""
    still, lively = make_stream("still"), make_stream("lively")
    for token_id in range(100):
        for stream in (still, lively):
            stream.add_token(token_id, None)
        deliver_batch([still, lively])
        assert (await anext(lively)).token_ids == [token_id]
    assert (await anext(still)).token_ids == list(range(100))


async def test_closing_ends_a_reader_that_waits():
    stream = make_stream()
    reader = asyncio.create_task(anext(stream, "ended"))
    await asyncio.sleep(0)
    await stream.aclose()
    assert await reader == "ended"


def test_a_stream_of_a_closed_loop_is_reported():
    async def make():
        return make_stream()

    stream = asyncio.run(make())
    stream.add_token(1, None)
    assert deliver_batch([stream]) == [stream]


def test_a_loop_that_closed_with_a_wake_up_under_way_is_reported_too():
    async def make():
        stream = make_stream()
        stream.add_token(1, None)
        assert deliver_batch([stream]) == []
        return stream

    stream = asyncio.run(make())
    stream.add_token(2, None)
    assert deliver_batch([stream]) == [stream]
