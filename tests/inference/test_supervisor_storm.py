"""A storm over the whole life of a server: clients in threads of their own ask, leave and abort
while settings and models change and engines fail and are rebuilt.

Which of it meets which is left to the threads; what holds, holds whatever happens.
"""

import random
import threading

from inference.errors import EngineDead, ModelLoadError, RequestRejected, SwapRefused
from inference.request import FinishReason
from inference.supervisor import EngineSupervisor
from tests.inference.engine_driving import collect, until
from tests.inference.faults import Faults
from tests.inference.helpers import expected_output, make_request
from tests.inference.supervising import ends, kill, model_folders, order

NUM_CLIENTS = 3
TUNES = [
    {"slots": 1},
    {"slots": 6},
    {"slots": "auto"},
    {"max_num_batched_tokens": 8},
    {"max_num_batched_tokens": 256},
    {"enable_prefix_cache": False},
    {"enable_prefix_cache": True},
    {"policy": "static"},
    {"policy": "continuous"},
    {"kv_memory_share": 0.3},
    {"kv_memory_share": "auto"},
]


class Client(threading.Thread):
    """Asks for one answer after another, and looks at what comes of each that was accepted."""

    def __init__(self, supervisor, seed):
        super().__init__(name=f"client-{seed}")
        self.supervisor = supervisor
        self.random = random.Random(seed)
        self.may_stop = threading.Event()
        self.failure = None
        self.num_accepted = 0

    def run(self):
        try:
            while not self.may_stop.is_set():
                self.ask()
        except BaseException as failure:
            self.failure = failure

    def ask(self):
        draw, served = self.random, self.supervisor.served
        if served is None:
            threading.Event().wait(0.001)
            return
        request = make_request(draw.randrange(1, 60), draw.randrange(1, 40), owner=self.name)
        try:
            stream = served.engine.add_request(request)
        except (RequestRejected, EngineDead):
            return
        self.num_accepted += 1
        if draw.random() < 0.1:
            stream.close()
            return
        if draw.random() < 0.2:
            served.engine.abort(request.request_id)
        result = collect(stream)
        num_tokens = len(result.token_ids)
        assert result.token_ids == expected_output(request.prompt_token_ids, num_tokens)
        if result.finish_reason is FinishReason.LENGTH:
            assert num_tokens == request.params.max_tokens


class Weather:
    """What happens to the server meanwhile."""

    def __init__(self, supervisor, folders, faults, seed):
        self.supervisor = supervisor
        self.folders = folders
        self.faults = faults
        self.random = random.Random(seed)

    def tune(self):
        self.supervisor.tune(self.random.choice(TUNES))

    def swap(self):
        name = self.random.choice(list(self.folders))
        try:
            self.supervisor.ask_swap(order(self.folders, name, drain_s=0.02))
        except SwapRefused:
            return
        until(lambda: self.supervisor.swap.is_over)

    def swap_in_vain(self):
        self.faults.load_errors["newer"] = ModelLoadError("a file is broken")
        try:
            self.supervisor.ask_swap(order(self.folders, "newer", drain_s=0.02))
        except SwapRefused:
            return
        until(lambda: self.supervisor.swap.is_over)
        assert self.supervisor.swap.stage == "failed"

    def break_down(self):
        """Rebuilt the first time, dead the second, until another model is chosen."""
        if self.supervisor.served is not None:
            engine = self.supervisor.engine
            kill(self.supervisor, self.faults)
            until(lambda: self.supervisor.engine is not engine or self.is_dead())
        self.revive()

    def is_dead(self):
        return self.supervisor.phase.name == "dead"

    def revive(self):
        self.faults.load_errors.clear()
        until(lambda: self.supervisor.phase.name in ("ready", "dead"))
        while self.supervisor.phase.name != "ready":
            self.swap()


def test_every_request_ends_once_whatever_the_server_goes_through(tmp_path):
    folders, faults = model_folders(tmp_path), Faults(num_blocks=32, max_model_len=400)
    supervisor = EngineSupervisor(
        faults.make_runner, {"max_num_seqs": 4}, backoff_s=0.0, look_every_s=0.01
    )
    supervisor.start(lambda report: folders["former"])
    until(lambda: supervisor.phase.name == "ready")
    weather = Weather(supervisor, folders, faults, seed=1)
    clients = [Client(supervisor, seed) for seed in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    moves = [weather.tune] * 12 + [weather.swap, weather.swap_in_vain, *[weather.break_down] * 2]
    weather.random.shuffle(moves)
    for move in moves:
        move()
        meet(clients)
    for client in clients:
        client.may_stop.set()
    for client in clients:
        client.join()
        if client.failure is not None:
            raise client.failure

    engine = supervisor.served.engine
    last = make_request(20, 10)
    assert ends(engine.add_request(last)).finish_reason is FinishReason.LENGTH
    assert last.output_token_ids == expected_output(last.prompt_token_ids, 10)
    assert engine.live_labels() == []
    supervisor.stop(1.0)
    engine._scheduler.check_integrity()
    assert engine._scheduler.kv.pool.num_used == 0
    until(lambda: all(runner.is_closed for runner in faults.runners))


def meet(clients):
    """Until the clients have asked some more, so that they meet what comes next."""
    before = sum(client.num_accepted for client in clients)
    until(
        lambda: (
            sum(client.num_accepted for client in clients) >= before + 5
            or any(client.failure for client in clients)
        )
    )
