"""Conversations in the browser, streamed over a websocket."""
