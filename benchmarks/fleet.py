"""Replicas under a stream of requests: how full they are and how long a request waits.

Requests arrive at random (Poisson) and go to a free place of any replica. Three approximations:

- the sequences that run in a replica are those that Little's law asks for: arrivals times the time
  that a request holds its place, which itself grows with the sequences that run beside it;
- a place is waited for as in M/M/c, c all places of the fleet, with that holding time (Erlang C);
- a prompt waits for other prompts of its replica as in M/G/1 with equal prompts (M/D/1).

Prompts go before tokens: a replica takes in prompts for a share of its time, and steps stretch so.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fleet:
    """`prompt_s` takes in one prompt; `step_s` is of a step with so many sequences."""

    replicas: int
    places: int  # sequences that run in one replica
    prompt_s: float
    steps: float  # of one answer: its tokens, over the acceptance length with drafts
    step_s: Callable[[float], float]

    def capacity(self) -> float:
        """Requests a second at which every place is always taken."""
        return self.replicas / (self.prompt_s + self.steps * self.step_s(self.places) / self.places)

    def holding_s(self, rate: float, running: float) -> float:
        """How long a request holds its place."""
        free = 1 - rate / self.replicas * self.prompt_s
        return self.prompt_s + self.steps * self.step_s(running) / free

    def running(self, rate: float) -> float:
        """Sequences in one replica; `ValueError` if the rate is beyond the fleet."""
        mine = rate / self.replicas
        if rate >= self.capacity() or mine * self.holding_s(rate, self.places) > self.places:
            raise ValueError(
                f"{rate} requests a second are more than the {self.capacity():.3g} that"
                f" {self.replicas} replicas can serve"
            )
        low, high = 0.0, float(self.places)
        for _ in range(30):
            middle = (low + high) / 2
            short = mine * self.holding_s(rate, max(middle, 1.0)) > middle
            low, high = (middle, high) if short else (low, middle)
        return high

    def at(self, rate: float) -> dict[str, float]:
        """Utilization, sequences in a replica, waiting, first token and time between tokens."""
        running = self.running(rate)
        step_s = self.step_s(max(running, 1.0))
        share = rate / self.replicas * self.prompt_s
        holding = self.holding_s(rate, max(running, 1.0))
        servers = self.replicas * self.places
        wait = erlang_c(servers, rate * holding) * holding / (servers - rate * holding)
        wait += share * self.prompt_s / (2 * (1 - share))
        return {
            "utilization": rate / self.capacity(), "running": running, "wait_s": wait,
            "first_token_s": wait + self.prompt_s + step_s, "step_s": step_s / (1 - share),
        }  # fmt: skip


def erlang_c(servers: int, offered: float) -> float:
    """The share of arrivals that find all servers taken; `offered` is arrivals times service."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))
