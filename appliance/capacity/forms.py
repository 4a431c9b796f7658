from django import forms

from appliance.capacity.mix import NAMES, TEAM, Mix
from appliance.capacity.plan import Plan, parse_levels
from appliance.capacity.recommend import Limits
from appliance.errors import BadRequest

LEVEL_TIMES = {"15": "15 s", "30": "30 s", "60": "60 s", "180": "3 min"}
GUARD_S = 5.0


def _input(**attrs: str) -> forms.TextInput:
    return forms.TextInput(attrs={"class": "input", "autocomplete": "off", **attrs})


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


class CapacityForm(forms.Form):
    mix = forms.ChoiceField(
        label="Requests look like", widget=forms.Select(attrs={"class": "select"})
    )
    levels = forms.CharField(
        label="At the same time", initial="1, 2, 4, 8", max_length=100, widget=_input()
    )
    ttft = forms.FloatField(
        label="TTFT p95 at most",
        initial=2.0,
        min_value=0.01,
        max_value=600,
        widget=_input(inputmode="decimal"),
    )
    itl = forms.FloatField(
        label="ITL p95 at most",
        initial=100,
        min_value=1,
        max_value=60_000,
        widget=_input(inputmode="numeric"),
    )
    speed = forms.FloatField(
        label="Each user gets at least",
        required=False,
        min_value=0,
        max_value=100_000,
        widget=_input(inputmode="decimal", placeholder="any"),
    )
    level_s = forms.ChoiceField(
        label="Measure each level for",
        choices=list(LEVEL_TIMES.items()),
        initial="30",
        widget=forms.Select(attrs={"class": "select"}),
    )
    guard = forms.BooleanField(
        label="Stop when members wait longer than 5 s", required=False, initial=True
    )
    low_priority = forms.BooleanField(
        label="Members' requests go first", required=False, initial=True
    )
    raise_slots = forms.BooleanField(
        label="Raise the slots to each level, set back at the end", required=False, initial=True
    )

    def __init__(self, *args: object, team: Mix | None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        names = [(name, words) for name, words in NAMES.items() if name != TEAM or team]
        # What the team really does is the best basis, where there is one.
        names.sort(key=lambda pair: pair[0] != TEAM)
        self.fields["mix"].choices = names

    @staticmethod
    def values_of(plan: Plan) -> dict[str, object]:
        """What the fields show for a plan, so that a test can be repeated or varied."""
        itl_s = plan.limits.itl_p95_s
        return {
            "mix": plan.mix,
            "levels": ", ".join(str(users) for users in plan.levels),
            "ttft": _plain(plan.limits.ttft_p95_s),
            "itl": _plain(itl_s and itl_s * 1000),
            "speed": _plain(plan.limits.user_tokens_per_s),
            "level_s": f"{plan.level_s:.0f}",
            "guard": plan.guard_s is not None,
            "low_priority": plan.is_low_priority,
            "raise_slots": plan.raises_slots,
        }

    def clean_levels(self) -> tuple[int, ...]:
        try:
            return parse_levels(self.cleaned_data["levels"])
        except BadRequest as exc:
            raise forms.ValidationError(exc.message) from exc

    def plan(self) -> Plan:
        got = self.cleaned_data
        return Plan(
            mix=got["mix"],
            levels=got["levels"],
            level_s=float(got["level_s"]),
            limits=Limits(
                ttft_p95_s=got["ttft"],
                itl_p95_s=got["itl"] / 1000,
                user_tokens_per_s=got["speed"] or None,
            ),
            is_low_priority=got["low_priority"],
            raises_slots=got["raise_slots"],
            guard_s=GUARD_S if got["guard"] else None,
        )
