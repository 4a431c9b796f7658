from django import template

from appliance.console.trouble import Trouble, trouble_now

register = template.Library()


@register.simple_tag
def server_trouble(section: str) -> Trouble | None:
    """What the admin of this page has to know; the live page tells it by itself, as it changes."""
    found = trouble_now() if section and section != "live" else None
    # Slowness is no news on every page: the models page has it beside the model.
    return None if found is None or found.key == "slow" else found
