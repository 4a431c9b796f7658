from collections.abc import Mapping
from typing import Any

from django import template

from appliance.capacity.slots_advice import slots_advice

register = template.Library()


@register.inclusion_tag("capacity/_advice.html")
def capacity_advice(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"advice": slots_advice(state)}
