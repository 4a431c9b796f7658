"""The page `/account/`: own usage and quota, own API keys, own password. No models of its own."""
