from django.db.models import F, QuerySet

from appliance.accounts.models import User


def members() -> QuerySet[User]:
    """All users: who can sign in first, then by name."""
    return User.objects.order_by(F("is_active").desc(), "username")


def admin_names() -> list[str]:
    """Whom a member can ask."""
    admins = User.objects.filter(is_staff=True, is_active=True).order_by("username")
    return list(admins.values_list("username", flat=True))
