"""The web product: members, keys, quotas, exposure, chat, API and console over one engine."""
