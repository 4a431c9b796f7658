"""C03: whatever arrives on the socket gets an error or a close code, and harms no answer."""

import json
import uuid

import pytest

from appliance.chat.protocol import MAX_FRAME_CHARS, MAX_TEXT_CHARS, parse_client_message
from appliance.errors import BadRequest
from tests.appliance.chat.browser import holds

ID = str(uuid.uuid4())
GOOD = {
    "type": "generation.start",
    "conversation_id": None,
    "text": "Hello",
    "client_id": "client-0001",
}
CONTINUE = {
    "type": "generation.continue",
    "conversation_id": ID,
    "message_id": 1,
    "client_id": "client-0001",
}

BAD_FRAMES = {
    "cut": "{",
    "list": "[]",
    "number": "5",
    "null": "null",
    "empty": "",
    "deep": "[" * 100_000,
    "deep objects": '{"type":' * 5_000,
    "no type": "{}",
    "unknown type": json.dumps({"type": "admin.shutdown"}),
    "type is a list": json.dumps({"type": []}),
    "missing fields": json.dumps({"type": "generation.start"}),
    "extra field": json.dumps({**GOOD, "role": "system"}),
    "id of wrong type": json.dumps({**GOOD, "conversation_id": 7}),
    "id that is none": json.dumps({**GOOD, "conversation_id": "x" * 36}),
    "text of wrong type": json.dumps({**GOOD, "text": ["Hello"]}),
    "blank text": json.dumps({**GOOD, "text": " \n"}),
    "NUL in the text": json.dumps({**GOOD, "text": "a\x00b"}),
    "half a surrogate pair": json.dumps({**GOOD, "text": "\ud800"}),
    "text too long": json.dumps({**GOOD, "text": "x" * (MAX_TEXT_CHARS + 1)}),
    "client_id too long": json.dumps({**GOOD, "client_id": "x" * 65}),
    "client_id not plain": json.dumps({**GOOD, "client_id": "ab\ncdefgh"}),
    "again without a conversation": json.dumps(
        {"type": "generation.again", "conversation_id": None, "client_id": "client-0001"}
    ),
    "edit without a message": json.dumps(
        {**GOOD, "type": "generation.edit", "conversation_id": ID, "message_id": None}
    ),
    "edit without a text": json.dumps(
        {"type": "generation.edit", "conversation_id": ID, "message_id": 1, "client_id": "c" * 9}
    ),
    "edit with a blank text": json.dumps(
        {**GOOD, "type": "generation.edit", "conversation_id": ID, "message_id": 1, "text": " "}
    ),
    "continue without a conversation": json.dumps({**CONTINUE, "conversation_id": None}),
    "continue without a message": json.dumps({**CONTINUE, "message_id": None}),
    "continue with a text": json.dumps({**CONTINUE, "text": "and so on"}),
    "continue of a message that is no number": json.dumps({**CONTINUE, "message_id": "1"}),
    "continue of half a message": json.dumps({**CONTINUE, "message_id": 1.5}),
    "continue without a client_id": json.dumps(
        {"type": "generation.continue", "conversation_id": ID, "message_id": 1}
    ),
    "stop of nothing": json.dumps({"type": "generation.stop", "conversation_id": None}),
    "negative number": json.dumps(
        {"type": "generation.subscribe", "conversation_id": ID, "last_seq": -1}
    ),
    "number as text": json.dumps(
        {"type": "generation.subscribe", "conversation_id": ID, "last_seq": "1"}
    ),
    "true as number": json.dumps(
        {"type": "generation.subscribe", "conversation_id": ID, "last_seq": True}
    ),
    "not a number": json.dumps(
        {"type": "generation.subscribe", "conversation_id": ID, "last_seq": float("nan")}
    ),
}


async def test_bad_frames_are_refused_one_by_one_and_a_good_one_then_works(
    tabs, backend, bob, caplog
):
    tab = await tabs.open(bob)
    for name, frame in BAD_FRAMES.items():
        await tab.socket.send_input({"type": "websocket.receive", "text": frame})
        refused = await tab.next()
        assert (refused["type"], refused["code"]) == ("error", "invalid_request"), name
        assert refused["message"]
    assert "Traceback" not in caplog.text
    assert (await tab.answered("Hello"))["state"] == "complete"


async def test_bad_frames_leave_a_running_answer_alone(tabs, backend, bob):
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    await tab.socket.send_to(text_data="{")
    await tab.until("error")
    backend.release()
    assert (await tab.until("generation.finished"))["message"]["state"] == "complete"


async def test_a_binary_frame_closes_the_socket(tabs, backend, bob):
    tab = await tabs.open(bob)
    await tab.socket.send_to(bytes_data=b"\x00\x01")
    assert await tab.closed_with() == 1003


async def test_a_huge_frame_closes_the_socket_and_not_the_answer(tabs, backend, bob):
    backend.hold(2)
    tab = await tabs.open(bob)
    await tab.ask("Tell me")
    await holds(backend)
    await tab.socket.send_to(text_data="x" * (MAX_FRAME_CHARS + 1))
    assert await tab.closed_with() == 1009
    assert backend.running


async def test_a_flood_is_refused_and_then_closed(tabs, backend, bob, monkeypatch):
    monkeypatch.setattr("appliance.chat.allowance.FRAMES_PER_S", 0)
    tab = await tabs.open(bob)
    for _ in range(300):
        await tab.send("ping")
    codes = set()
    while True:
        output = await tab.socket.receive_output(timeout=10)
        if output["type"] == "websocket.close":
            break
        message = json.loads(output["text"])
        codes.add(message.get("code", message["type"]))
    assert codes == {"pong", "rate_limit_exceeded"}
    assert output["code"] == 4429


def test_a_good_message_is_read_with_its_id_as_uuid():
    read = parse_client_message({**GOOD, "conversation_id": ID})
    assert read == {**GOOD, "conversation_id": uuid.UUID(ID)}


@pytest.mark.parametrize("value", [[1], {"a": 1}, "x" * 500, 1e400, None])
def test_refusals_name_the_field_and_stay_short(value):
    with pytest.raises(BadRequest) as caught:
        parse_client_message({**GOOD, "conversation_id": value or 5})
    assert "conversation_id" in caught.value.message
    assert len(caught.value.message) < 200
