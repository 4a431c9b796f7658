"""Who can reach which part of the server: the rule in force beside what a test found."""

import ipaddress
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from appliance.exposure.policy import (
    PRIVATE_NETWORKS,
    Address,
    ExposurePolicy,
    Network,
    contains,
)
from appliance.exposure.reach import Answer, Listening, ask_all, first_inside, is_let_in

LOOPBACK: tuple[Network, ...] = (
    ipaddress.ip_network("127.0.0.0/8"),
    ipaddress.ip_network("::1/128"),
)
# Part, who it is for, and what the caller needs to come in.
PARTS = (
    ("chat", "Chat", "people, with a browser", "Allowed, sign-in"),
    ("api", "API", "scripts, with a key", "Allowed, API key"),
    ("console", "Console", "admins only", "Allowed, admin sign-in"),
    ("metrics", "Metrics", "for a monitor to read", "Allowed, admin key"),
)
# More networks than this share one column.
_MAX_COLUMNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    allowed: str
    tone: str
    icon: str
    verdict: str

    @property
    def is_blocked(self) -> bool:
        return self.allowed == "Blocked"

    @property
    def is_wrong(self) -> bool:
        return self.tone == "danger"


@dataclass(slots=True, kw_only=True)
class Column:
    title: str
    caption: str
    is_allowed: bool
    # Empty for everywhere else.
    networks: Sequence[Network] = ()
    # An address of this machine there, and the socket that takes calls to it.
    probe: Address | None = None
    socket: Listening | None = None
    can_arrive: bool = True
    answers: dict[str, Answer] = field(default_factory=dict)


def reach_columns(
    policy: ExposurePolicy,
    sockets: Sequence[Listening],
    own: Sequence[Address],
    prefer_port: int | None = None,
) -> list[Column]:
    """The places that callers come from, tested where this machine can."""
    sockets = sorted(sockets, key=lambda s: s.port != prefer_port)
    outside = [s for s in sockets if not s.is_loopback]
    columns = [_local_column(policy, sockets)]
    for title, caption, networks in _named(policy, bool(outside)):
        probe = first_inside(networks, own)
        columns.append(
            Column(
                title=title,
                caption=caption,
                is_allowed=True,
                networks=networks,
                probe=probe,
                socket=_taking(outside, probe),
                can_arrive=bool(outside),
            )
        )
    columns.append(_elsewhere(policy, outside, own))
    with ThreadPoolExecutor(len(columns)) as pool:
        for column, answers in zip(columns, pool.map(_test, columns), strict=True):
            column.answers = answers
    return columns


def reach_rows(columns: Sequence[Column]) -> list[tuple[str, str, list[Cell]]]:
    """A row a part: its name, whom it is for, and a cell a column."""
    return [
        (name, whom, [_cell(part, allowed, column) for column in columns])
        for part, name, whom, allowed in PARTS
    ]


def reach_faults(columns: Sequence[Column]) -> list[str]:
    """What answers although it should not, and what should but does not; in sentences."""
    found = []
    for part, name, _, allowed in PARTS:
        for column in columns:
            cell = _cell(part, allowed, column)
            if cell.is_wrong:
                where = column.title[:1].lower() + column.title[1:]
                wish = "blocked" if cell.is_blocked else "allowed"
                found.append(f"{name} from {where} is {wish}, but {cell.verdict}.")
    return found


def _local_column(policy: ExposurePolicy, sockets: Sequence[Listening]) -> Column:
    probes = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    probe = next((p for p in probes if _taking(sockets, p)), probes[0])
    return Column(
        title="This machine",
        caption="127.0.0.1, ::1",
        is_allowed=policy.admits(probe),
        networks=LOOPBACK,
        probe=probe,
        socket=_taking(sockets, probe),
        can_arrive=bool(sockets),
    )


def _named(policy: ExposurePolicy, is_open: bool) -> list[tuple[str, str, Sequence[Network]]]:
    if policy.networks is None:
        return []
    if policy.networks == PRIVATE_NETWORKS:
        private = [network for network in PRIVATE_NETWORKS if network not in LOOPBACK]
        return [("Private networks", "10.*, 172.16–31.*, 192.168.*, fc00::/7", private)]
    named = [n for n in policy.networks if not any(_inside(n, local) for local in LOOPBACK)]
    shown = [(str(n), _size_words(n), (n,)) for n in named[:_MAX_COLUMNS]]
    rest = named[_MAX_COLUMNS:]
    if rest:
        shown[-1] = (f"{len(rest) + 1} more networks", "all allowed", named[_MAX_COLUMNS - 1 :])
    return shown


def _elsewhere(
    policy: ExposurePolicy, outside: Sequence[Listening], own: Sequence[Address]
) -> Column:
    beyond = [a for a in own if policy.networks is not None and not contains(policy.networks, a)]
    probe = next((a for a in beyond if _taking(outside, a)), None)
    return Column(
        title="Anywhere else",
        caption="the internet, guests",
        is_allowed=policy.networks is None and bool(outside),
        probe=probe,
        socket=_taking(outside, probe),
        can_arrive=bool(outside),
    )


def _taking(sockets: Sequence[Listening], address: Address | None) -> Listening | None:
    if address is None:
        return None
    return next((s for s in sockets if s.takes(address)), None)


def _inside(network: Network, other: Network) -> bool:
    return network.version == other.version and network.subnet_of(other)  # type: ignore[arg-type]


def _size_words(network: Network) -> str:
    if network.num_addresses == 1:
        return "one address"
    return f"{network.num_addresses:,} addresses" if network.version == 4 else "a network"


def _test(column: Column) -> dict[str, Answer]:
    if column.probe is None or column.socket is None:
        return {}
    return ask_all(column.probe, column.socket.port)


def _cell(part: str, allowed: str, column: Column) -> Cell:
    wish = allowed if column.is_allowed else "Blocked"
    tone, icon, verdict = _verdict(part, column)
    return Cell(allowed=wish, tone=tone, icon=icon, verdict=verdict)


def _verdict(part: str, column: Column) -> tuple[str, str, str]:
    answer = column.answers.get(part)
    if answer is None:
        if not column.can_arrive:
            return ("", "info", "cannot arrive: it listens to this machine only")
        why = "no probe outside" if not column.networks else "this machine has no address there"
        return ("", "info", f"not tested: {why}")
    is_in = is_let_in(part, answer)
    if is_in and column.is_allowed:
        return ("ok", "check", f"answered in {max(1, round(answer.duration_s * 1000)):,} ms")
    if is_in:
        return ("danger", "error", "it answered")
    if column.is_allowed:
        got = "no answer came" if answer.status is None else f"the answer was {answer.status}"
        return ("danger", "error", got)
    what = "no answer" if answer.status is None else "refused"
    return ("ok", "block", f"{what}, as it should be")
