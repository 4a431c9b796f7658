import logging
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.contrib.auth.models import AbstractBaseUser
from django.http import HttpRequest

logger = logging.getLogger(__name__)


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]
    """Sign-in only: accounts are made by admins, never by a visitor."""

    error_messages = {
        **DefaultAccountAdapter.error_messages,
        # One text for a wrong password, an unknown name and a switched-off account.
        "username_password_mismatch": "That name and password do not match.",
        "too_many_login_attempts": (
            "Too many wrong tries. Wait 5 minutes, or ask an admin for a new sign-in link."
        ),
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def get_client_ip(self, request: HttpRequest) -> str:
        # The exposure layer has already put the caller's own address here; headers are not asked.
        return request.META.get("REMOTE_ADDR") or "unknown"

    def _get_login_attempts_cache_key(self, request: HttpRequest, **credentials: Any) -> str:
        return f"{self.get_client_ip(request)} {str(credentials.get('username', '')).lower()}"

    def authenticate(self, request: HttpRequest, **credentials: Any) -> AbstractBaseUser | None:
        user: AbstractBaseUser | None = super().authenticate(request, **credentials)
        return user if user is not None and user.is_active else None

    def authentication_failed(self, request: HttpRequest, **credentials: Any) -> None:
        logger.warning(
            "sign-in failed for %r from %s",
            str(credentials.get("username", ""))[:150],
            self.get_client_ip(request),
        )

    def add_message(self, *args: Any, **kwargs: Any) -> None:
        """Say nothing after sign-in and sign-out: the next page shows it."""
