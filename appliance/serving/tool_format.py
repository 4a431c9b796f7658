"""Which form of tool calls a model was trained with, told from its chat template."""

from appliance.serving.types import ToolFormat


def tool_format_of(template: str) -> ToolFormat:
    """ "" for a template that knows no tools, or none of these forms."""
    if "tools" not in template or "<function=" in template:
        return ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3"
    return ""
