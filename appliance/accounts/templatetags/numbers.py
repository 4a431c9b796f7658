from django import template

register = template.Library()


@register.filter
def grouped(number: int) -> str:
    """`38800` as `38,800`."""
    return f"{number:,}"
