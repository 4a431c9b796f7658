from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]
    """Sign-in only: accounts are made by admins, never by a visitor."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False
