"""How a fleet is asked: waits in seconds, limits, and the budget of retries."""

from __future__ import annotations

from dataclasses import dataclass

from segue.server.settings.shared_config import MAX_ATTEMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The settings of `Fleet`.

    | field | meaning |
    |---|---|
    | `served_model` | instances of other models are left alone |
    | `policy` | the placement policy of either half (`server.balance.policies`) |
    | `backlog_outputs`, `backlog_wait_s` | so many outputs may wait for a client for longer than that. After a pause of our own all that was sent meanwhile comes at once; what can wait is bounded by the request's `max_tokens` |
    | `no_replica_wait_s` | how long a request waits for somebody to serve it |
    | `replacement_wait_s` | the same for one whose client has tokens already |
    | `reported_loss_wait_s` | how long a request passes over a worker that its peer says is gone |
    | `max_attempts` | how often one request is placed in all |
    | `retry_budget`, `retry_refill` | how many retries the fleet may make in a row, and how much of one each success gives back |
    """  # noqa: E501

    served_model: str
    policy: str
    backlog_outputs: int = 1024
    backlog_wait_s: float = 5.0
    no_replica_wait_s: float = 2.0
    replacement_wait_s: float = 10.0
    reported_loss_wait_s: float = 1.0
    max_attempts: int = MAX_ATTEMPTS
    retry_budget: float = 10.0
    retry_refill: float = 0.1
