"""How numbers and times are written on pages."""

from datetime import datetime

from django import template
from django.utils import timezone

register = template.Library()


@register.filter
def grouped(number: int) -> str:
    """`38800` as `38,800`."""
    return f"{number:,}"


@register.filter
def size(num_bytes: float) -> str:
    """`351 MiB`, `8.0 GiB`: the units of the live page."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:,.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    return f"{num_bytes:.0f} B"


@register.filter
def ago(moment: datetime) -> str:
    """`now`, `4 min ago`, `3 h ago`, then the date."""
    now = timezone.now()
    seconds = (now - moment).total_seconds()
    if seconds < 60:
        return "now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 24 * 3600:
        return f"{seconds // 3600:.0f} h ago"
    local = timezone.localtime(moment)
    year = "" if local.year == timezone.localtime(now).year else f" {local.year}"
    return f"{local.day} {local:%b}{year} {local:%H:%M}"
